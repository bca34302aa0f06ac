"""What a gRPC caller asks, from protobuf: read by the same checks as a body of the HTTP API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from pdserve.errors import InvalidRequest
from pdserve.rpc.convert import sampling_from_proto
from pdserve.tokenizer.bundle import SAMPLING_NAMES
from pdserve.v1 import gateway_pb2
from router.openai_json import refused, validate
from router.openai_messages import NamedTool, ToolChoice, tool_use
from router.openai_tools import ToolUse
from router.prompts import check_echo, check_several, no_prompts, prompts_answer
from router.request import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.tokens import check_message_count

MAX_LABEL = 256  # characters
_MODES: dict[str, ToolChoice] = {"none": "none", "auto": "auto", "required": "required"}


def asks_from_proto(message: gateway_pb2.GenerateRequest, timeout_s: float | None) -> tuple[Ask, ...]:
    """One for each prompt. Raises InvalidRequest naming the field at fault."""
    tools = _tools(message)
    prompts = _prompts(message, tools)
    n = message.n or 1
    check_several(len(prompts), n, message.want_record, "want_record")
    sampling = sampling_from_proto(message.sampling)
    if message.echo:
        check_echo(sampling.logprobs)
    if tools is not None and sampling.grammar is not None:
        tools.check_grammar(sampling.grammar, sampling.grammar.kind)
    common = Ask(
        prompt=prompts[0],
        sampling=sampling,
        model=message.model,
        adapter=message.adapter,
        label=_label(message.request_id),
        want_record=message.want_record,
        timeout_s=timeout_s,
        unset=frozenset(name for name in SAMPLING_NAMES if not message.sampling.HasField(name)),
        tools=tools,
        n=n,
    )
    return tuple(replace(common, prompt=prompt) for prompt in prompts)


def _label(request_id: str) -> str:
    """The caller's name for its request, which goes to the logs."""
    if len(request_id) > MAX_LABEL:
        problem = f"it has {len(request_id)} characters"
        raise refused("request_id", problem, f"use at most {MAX_LABEL}", "INVALID_REQUEST_ID")
    return request_id


def _prompts(message: gateway_pb2.GenerateRequest, tools: ToolUse | None) -> tuple[Prompt, ...]:
    """Raises InvalidRequest when there is none, and for an option that does not go with its kind."""
    kind = message.WhichOneof("prompt")
    if kind == "chat":
        for name, given in (("echo", message.echo), ("add_special_tokens", message.HasField("add_special_tokens"))):
            if given:
                raise refused(name, "it does not go with chat messages", "leave it out, or send text")
        return (_chat(message.chat, shows_tools=tools is not None or not message.chat.WhichOneof("tool_choice")),)
    add_special = not message.HasField("add_special_tokens") or message.add_special_tokens
    if kind == "several":
        if not message.several.prompts:
            raise no_prompts()
        check_several(len(message.several.prompts), 1, False, "")
        return tuple(_plain(listed, add_special) for listed in message.several.prompts)
    return (_plain(message, add_special),)


def _plain(given: gateway_pb2.GenerateRequest | gateway_pb2.ListedPrompt, add_special: bool) -> Prompt:
    match given.WhichOneof("prompt"):
        case "text":
            return TextPrompt(given.text, add_special)
        case "tokens":
            return TokenPrompt(tuple(given.tokens.ids))
    raise refused("prompt", "there is no prompt", "send text, chat messages or token ids", "EMPTY_PROMPT")


def _chat(chat: gateway_pb2.ChatPrompt, *, shows_tools: bool) -> ChatPrompt:
    """Raises InvalidRequest naming the field that is no JSON."""
    check_message_count(len(chat.messages))
    header = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return ChatPrompt(
        messages=tuple(_message(m, f"messages[{n}]") for n, m in enumerate(chat.messages)),
        tools=tuple(_tool_list(chat)) if shows_tools else (),
        add_generation_prompt=prompts_answer(header, chat.continue_final_message),
        continue_final_message=chat.continue_final_message,
        variables=_json(chat.variables_json, "variables_json", dict) or {},
    )


def _tools(message: gateway_pb2.GenerateRequest) -> ToolUse | None:
    """None where calls are not to be read off the answer."""
    chat, kind = message.chat, message.chat.WhichOneof("tool_choice")
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    if kind is None:
        if parallel is not None:
            raise refused("parallel_tool_calls", "calls are only read with a tool_choice", "set one")
        return None
    return tool_use(_tool_list(chat), _choice(chat, kind), parallel)


def _choice(chat: gateway_pb2.ChatPrompt, kind: str) -> ToolChoice:
    if kind == "tool_function":
        named = {"type": "function", "function": {"name": chat.tool_function}}
        return validate(named, NamedTool, "tool_choice")
    if chat.tool_mode not in _MODES:
        raise refused("tool_choice", f"{chat.tool_mode!r:.64} is no mode", f"use one of: {', '.join(_MODES)}")
    return _MODES[chat.tool_mode]


def _tool_list(chat: gateway_pb2.ChatPrompt) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = _json(chat.tools_json, "tools_json", list) or []
    if not all(isinstance(tool, dict) for tool in tools):
        raise _not_json("tools_json", "not every tool is an object")
    return tools


def _message(message: gateway_pb2.ChatMessage, where: str) -> dict[str, object]:
    """Besides role and content only what is set: a template may ask whether a name is there."""
    calls = _json(message.tool_calls_json, f"{where}.tool_calls_json", list)
    content = message.content if message.content or not calls else None
    more = {
        "name": message.name,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return {"role": message.role, "content": content, **{key: value for key, value in more.items() if value}}


def _json(text: str, where: str, kind: type) -> Any:
    """None for no text."""
    if not text:
        return None
    try:
        value = from_json(text)  # unlike `json`, it takes no lone surrogates: they are no text
    except ValueError as error:
        raise _not_json(where, f"not JSON: {error}") from error
    if not isinstance(value, kind):
        raise _not_json(where, f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _not_json(where: str, problem: str) -> InvalidRequest:
    return refused(where, problem, "send JSON as the field documents it", "INVALID_JSON")
