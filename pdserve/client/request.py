"""What a caller may pass to `generate` and `complete`, and the request that it becomes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from pdserve.errors import ConfigError, InvalidRequest, Refused
from pdserve.request import JSON_SCHEMA, LARK, REGEX, Grammar, SamplingParams, check_choices
from pdserve.rpc.convert import sampling_to_proto
from pdserve.v1 import gateway_pb2

DEFAULT_TIMEOUT_S = 300.0


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`, besides the prompt text."""

    messages: Sequence[Mapping[str, Any]]  # {"role": ..., "content": ...}, through the chat template
    tools: Sequence[Mapping[str, Any]]  # functions that the template shows to the model, as in OpenAI's API
    tool_choice: str | Mapping[str, Any]  # none | auto | required, or one function; without it calls stay text
    parallel_tool_calls: bool  # False: the first call only
    add_generation_prompt: bool  # the header of an answer comes last; default: unless the last message goes on
    continue_final_message: bool  # the last message is the beginning of the answer
    chat_template_kwargs: Mapping[str, Any]  # further names for the template
    token_ids: Sequence[int]  # used as they are
    prompts: Sequence[str | Sequence[int]]  # several texts or lists of token ids, each with `n` outputs
    echo: bool  # the prompt's text comes first
    add_special_tokens: bool  # False: a text without the model's begin token
    model: str  # served model name; default: the only one served
    adapter: str  # adapter name; default: base model
    request_id: str  # the caller's label for logs
    want_record: bool  # also yield the HandoffRecord
    n: int  # outputs of the one prompt, which is computed and handed over once; default 1
    timeout_s: float  # deadline of the whole call; default 300
    sampling: SamplingParams  # instead of the single options below

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    max_tokens: int  # default: until the model ends, at most what the context leaves
    min_tokens: int
    ignore_eos: bool
    logprobs: int
    json_schema: str | Mapping[str, Any]  # the output is JSON that this schema allows
    regex: str  # the output matches this expression
    lark: str  # the output follows this grammar
    skip_special_tokens: bool


_GRAMMARS = (JSON_SCHEMA, REGEX, LARK)
# Options for which a model may have defaults of its own.
MODEL_DEFAULTS = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
_CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
# Fields that have another name than the option that sets them.
_OPTIONS = {
    "several": "prompts",
    "tool_function": "tool_choice",
    "tool_mode": "tool_choice",
    "tools_json": "tools",
    "variables_json": "chat_template_kwargs",
}
SAMPLING_NAMES = frozenset({*(field.name for field in fields(SamplingParams)), *_GRAMMARS} - {"grammar"})


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. Raises ConfigError, without the key, for one that no header can carry."""
    if not all("!" <= character <= "~" for character in api_key):
        raise ConfigError(
            "the API key has blanks or other characters that a header cannot carry",
            field="api_key",
            remedy="give the key as it was given to you, without quotes or line breaks",
        )
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def outputs_of(request: gateway_pb2.GenerateRequest) -> int:
    """Choices that its answer has."""
    return request.n * (len(request.several.prompts) or 1)


def unread(later: frozenset[str]) -> Refused:
    """For fields of a request that its router did not read: what it answers would not be what was asked."""
    way = min(later)
    name = "messages" if way.startswith("chat.messages.") else way.rpartition(".")[2]
    return Refused(
        "the router does not know this option: it is of an older version",
        reason="NOT_CAPABLE",
        field=_OPTIONS.get(name, name),
        remedy="update the router, or leave it out",
    )


def build(prompt: str | None, options: Mapping[str, Any]) -> tuple[gateway_pb2.GenerateRequest, float]:
    """The request, and the deadline of the call in seconds. Raises InvalidRequest by name."""
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise _unknown(unknown[0])
    request = gateway_pb2.GenerateRequest(
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
        request_id=options.get("request_id", ""),
        want_record=options.get("want_record", False),
        n=_outputs(options),
        sampling=sampling_to_proto(_sampling(options)),
        echo=options.get("echo", False),
        add_special_tokens=options.get("add_special_tokens"),
    )
    if "sampling" not in options:  # what the caller leaves open is the model's to say
        for name in MODEL_DEFAULTS - options.keys():
            request.sampling.ClearField(name)
    _set_prompt(request, prompt, options)
    timeout_s = float(options.get("timeout_s", DEFAULT_TIMEOUT_S))
    if not 0 < timeout_s < float("inf"):
        raise _invalid("timeout_s", f"{timeout_s:g} is not allowed", "use seconds above 0")
    return request, timeout_s


def _outputs(options: Mapping[str, Any]) -> int:
    n = options.get("n", 1)
    if type(n) is not int:
        raise _invalid("n", f"{n!r} is no number of outputs", "use a whole number")
    check_choices(n)
    return n


def _set_prompt(request: gateway_pb2.GenerateRequest, prompt: str | None, options: Mapping[str, Any]) -> None:
    messages, token_ids, prompts = options.get("messages"), options.get("token_ids"), options.get("prompts")
    if sum(given is not None for given in (prompt, messages, token_ids, prompts)) != 1:
        raise _invalid("prompt", "it must be given in one form", "pass a text, messages=, token_ids= or prompts=")
    for name in _CHAT_OPTIONS:
        if messages is None and options.get(name):
            raise _invalid(name, "it goes with messages", "pass messages=, or leave it out")
    try:
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            request.chat.CopyFrom(_chat(messages, options))
        elif prompts is not None:
            request.several.CopyFrom(gateway_pb2.PromptList(prompts=map(_listed, prompts)))
        else:
            request.tokens.CopyFrom(gateway_pb2.TokenPrompt(ids=token_ids))
    except (TypeError, ValueError, KeyError) as error:
        raise _invalid(
            "prompt",
            f"it cannot be sent: {type(error).__name__}: {error}",
            'use a str, messages like {"role": "user", "content": "..."}, or token ids',
        ) from error


def _chat(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> gateway_pb2.ChatPrompt:
    tools, variables = options.get("tools"), options.get("chat_template_kwargs")
    choice = options.get("tool_choice")
    return gateway_pb2.ChatPrompt(
        messages=[_message(message) for message in messages],
        tools_json=json.dumps(list(tools)) if tools else "",
        tool_mode=choice if isinstance(choice, str) else None,
        tool_function=_function(choice) if isinstance(choice, Mapping) else None,
        parallel_tool_calls=options.get("parallel_tool_calls"),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
        variables_json=json.dumps(dict(variables)) if variables else "",
    )


def _function(choice: Mapping[str, Any]) -> str:
    match choice:
        case {"function": {"name": str(name)}}:
            return name
    remedy = 'use a mode, or {"type": "function", "function": {"name": "..."}}'
    raise _invalid("tool_choice", f"{dict(choice)!r:.64} names no function", remedy)


def _listed(prompt: str | Sequence[int]) -> gateway_pb2.ListedPrompt:
    if isinstance(prompt, str):
        return gateway_pb2.ListedPrompt(text=prompt)
    return gateway_pb2.ListedPrompt(tokens=gateway_pb2.TokenPrompt(ids=prompt))


def _message(message: Mapping[str, Any]) -> gateway_pb2.ChatMessage:
    role = message["role"]
    calls = message.get("tool_calls")
    return gateway_pb2.ChatMessage(
        role=role,
        content=(message.get("content") or "") if calls else message["content"],
        name=message.get("name", ""),
        tool_calls_json=json.dumps(calls) if calls else "",
        tool_call_id=message.get("tool_call_id", ""),
        reasoning_content=message.get("reasoning_content", ""),
    )


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    single = {name: value for name, value in options.items() if name in SAMPLING_NAMES}
    whole: SamplingParams | None = options.get("sampling")
    if whole is not None:
        if single:
            given = ", ".join(sorted(single))
            raise _invalid("sampling", f"it is given together with {given}", "pass one or the other")
        return whole
    if isinstance(single.get("stop"), str):
        single["stop"] = (single["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in single:
            single[name] = tuple(single[name])
    kinds = [kind for kind in _GRAMMARS if kind in single]
    if len(kinds) > 1:
        raise _invalid(kinds[1], f"it is given together with {kinds[0]}", "pass one or the other")
    for kind in kinds:
        text = single.pop(kind)
        single["grammar"] = Grammar(kind, text if isinstance(text, str) else json.dumps(text))
    return SamplingParams(**single)


def _unknown(name: str) -> InvalidRequest:
    near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
    every = f"use one of {', '.join(GenerateOptions.__annotations__)}"
    return _invalid(name, "there is no such option", f"did you mean {near[0]}?" if near else every)


def _invalid(name: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_ARGUMENT", field=name, remedy=remedy)
