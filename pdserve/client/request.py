"""What a caller may pass to `generate` and `complete`, and the request that it becomes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc.convert import sampling_to_proto
from pdserve.v1 import gateway_pb2

DEFAULT_TIMEOUT_S = 300.0


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`, besides the prompt text."""

    messages: Sequence[Mapping[str, str]]  # {"role": ..., "content": ...}, through the chat template
    token_ids: Sequence[int]  # used as they are
    model: str  # served model name; default: the only one served
    adapter: str  # adapter name; default: base model
    request_id: str  # the caller's label for logs
    want_record: bool  # also yield the HandoffRecord
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
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int


SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. Raises ConfigError, without the key, for one that no header can carry."""
    if not all("!" <= character <= "~" for character in api_key):
        raise ConfigError(
            "the API key has blanks or other characters that a header cannot carry",
            field="api_key",
            remedy="give the key as it was given to you, without quotes or line breaks",
        )
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


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
        sampling=sampling_to_proto(_sampling(options)),
    )
    _set_prompt(request, prompt, options)
    timeout_s = float(options.get("timeout_s", DEFAULT_TIMEOUT_S))
    if not 0 < timeout_s < float("inf"):
        raise _invalid("timeout_s", f"{timeout_s:g} is not allowed", "use seconds above 0")
    return request, timeout_s


def _set_prompt(request: gateway_pb2.GenerateRequest, prompt: str | None, options: Mapping[str, Any]) -> None:
    messages, token_ids = options.get("messages"), options.get("token_ids")
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise _invalid("prompt", "it must be given in one form", "pass a text, or messages=, or token_ids=")
    try:
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            chat = [gateway_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
            request.chat.CopyFrom(gateway_pb2.ChatPrompt(messages=chat))
        else:
            request.tokens.CopyFrom(gateway_pb2.TokenPrompt(ids=token_ids))
    except (TypeError, ValueError, KeyError) as error:
        raise _invalid(
            "prompt",
            f"it cannot be sent: {type(error).__name__}: {error}",
            'use a str, messages like {"role": "user", "content": "..."}, or token ids',
        ) from error


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
    return SamplingParams(**single)


def _unknown(name: str) -> InvalidRequest:
    near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
    every = f"use one of {', '.join(GenerateOptions.__annotations__)}"
    return _invalid(name, "there is no such option", f"did you mean {near[0]}?" if near else every)


def _invalid(name: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_ARGUMENT", field=name, remedy=remedy)
