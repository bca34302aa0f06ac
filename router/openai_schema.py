"""The bodies of /v1/chat/completions and /v1/completions: what is understood, checked by name, as typed requests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import StrictBool, StrictInt, StrictStr

from pdserve.errors import shown
from pdserve.request import MAX_LOGPROBS, SamplingParams
from router.openai_fields import INSTEAD, NEUTRAL, CommonBody
from router.openai_json import MAX_ENTRIES, KnownFields, Strict, parse, refused
from router.openai_messages import Message, ToolChoice, tool_use
from router.prompts import check_echo, check_several, ids_of, prompts_answer, prompts_of
from router.request import Ask, ChatPrompt, TextPrompt

__all__ = ["MAX_ENTRIES", "ChatCompletionBody", "CompletionBody", "parse_body", "parse_chat", "parse_completion"]

_DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it


class ChatCompletionBody(CommonBody):
    messages: list[Message]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Any] | None = None  # see `tool_use`
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    modalities: tuple[Literal["text"]] | None = None  # that which asks for nothing: many clients send it

    def ask(self) -> Ask:
        """Raises InvalidRequest for fields that contradict each other."""
        tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        sampling = self.sampling(self._max_tokens(), self._logprobs())
        if tools is not None:
            tools.check_grammar(sampling.grammar, "response_format")
        return Ask(
            prompt=self.prompt(tools is not None),
            sampling=sampling,
            model=self.model,
            want_record=bool(self.pdserve_record),
            unset=self.unset,
            tools=tools,
            n=self.outputs,
        )

    def prompt(self, with_tools: bool) -> ChatPrompt:
        return ChatPrompt(
            messages=tuple(message.plain(f"messages[{n}]") for n, message in enumerate(self.messages)),
            tools=tuple(self.tools or ()) if with_tools else (),
            add_generation_prompt=prompts_answer(self.add_generation_prompt, bool(self.continue_final_message)),
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs or {},
        )

    def _max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            problem = f"{shown(old)} contradicts max_completion_tokens ({shown(new)})"
            raise refused("max_tokens", problem, "send only one of them")
        return old if new is None else new

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "it needs logprobs", "set logprobs to true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise refused("top_logprobs", f"{shown(self.top_logprobs)} is not allowed", f"use 0 to {MAX_LOGPROBS}")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(CommonBody):
    prompt: Any  # a text, a list of texts, token ids, or a list of lists of them: see `prompts`
    best_of: StrictInt | None = None  # only as many as are wanted
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    suffix: None = None
    add_special_tokens: StrictBool | None = None

    def asks(self) -> tuple[Ask, ...]:
        """One for each prompt. Raises InvalidRequest for fields that contradict each other."""
        prompts = prompts_of(self.prompt, self.add_special_tokens is not False)
        if self.echo:
            check_echo(self.logprobs)
        if self.best_of is not None and self.best_of != self.outputs:
            problem = "the best of more answers than are wanted are not looked for"
            raise refused("best_of", problem, "leave it out, or set it to n")
        record = bool(self.pdserve_record)
        check_several(len(prompts), self.outputs, record, "pdserve_record")
        sampling = self._sampling()
        return tuple(
            Ask(prompt, sampling, self.model, want_record=record, unset=self.unset, n=self.outputs)
            for prompt in prompts
        )

    def _sampling(self) -> SamplingParams:
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.max_tokens is None and self.min_tokens is not None:
            max_tokens = max(max_tokens, self.min_tokens)
        return self.sampling(max_tokens, self.logprobs)


class TokenizeBody(Strict):
    """What a prompt's ids would be: of a text, or of a conversation through the chat template."""

    model: StrictStr = ""
    prompt: StrictStr | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    return_token_strs: StrictBool | None = None

    def asked(self) -> TextPrompt | ChatPrompt:
        """Raises InvalidRequest unless there is one prompt."""
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "there must be a prompt or messages", "send one of them", "MISSING_FIELD")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        tool_use(self.tools, None, None)
        return ChatPrompt(
            messages=tuple(message.plain(f"messages[{n}]") for n, message in enumerate(self.messages or ())),
            tools=tuple(self.tools or ()),
            add_generation_prompt=prompts_answer(self.add_generation_prompt, bool(self.continue_final_message)),
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs or {},
        )


class DetokenizeBody(Strict):
    model: StrictStr = ""
    tokens: Any
    skip_special_tokens: StrictBool = True

    def ids(self) -> tuple[int, ...]:
        """Raises InvalidRequest naming the entry that is no token id."""
        if not isinstance(self.tokens, list):
            raise refused("tokens", f"a {type(self.tokens).__name__} is no list of ids", "send token ids")
        return ids_of(self.tokens, "tokens")


_TEXT_ONLY = dict.fromkeys(("prompt", "best_of", "echo", "suffix"), "send it to /v1/completions")
_CHAT_ONLY = dict.fromkeys(("messages", "tools", "max_completion_tokens"), "send it to /v1/chat/completions")
_CHAT_FIELDS = KnownFields(NEUTRAL | {"modalities"}, INSTEAD | _TEXT_ONLY)
_TEXT_FIELDS = KnownFields(NEUTRAL | {"suffix"}, INSTEAD | _CHAT_ONLY)


def parse_chat(data: bytes) -> ChatCompletionBody:
    """Raises InvalidRequest naming the first field that cannot be taken."""
    body = parse(data, ChatCompletionBody, known=_CHAT_FIELDS)
    body.check_stream()
    return body


def parse_completion(data: bytes) -> CompletionBody:
    """Raises InvalidRequest naming the first field that cannot be taken."""
    body = parse(data, CompletionBody, ids="prompt", known=_TEXT_FIELDS)
    body.check_stream()
    return body


parse_body = parse_chat
