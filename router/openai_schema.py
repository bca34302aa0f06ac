"""The bodies of /v1/chat/completions and /v1/completions: what is understood, checked by name, as typed requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from pdserve.errors import shown
from pdserve.request import MAX_LOGPROBS, SamplingParams
from router.openai_fields import NEUTRAL, Always1, CommonBody
from router.openai_json import MAX_ENTRIES, Body, Strict, parse, refused
from router.request import Ask, ChatPrompt, TextPrompt, TokenPrompt

__all__ = ["MAX_ENTRIES", "ChatCompletionBody", "CompletionBody", "parse_body", "parse_chat", "parse_completion"]

MAX_PROMPTS = 128  # of one body
_DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it


class TextPart(Strict):
    type: Literal["text"]
    text: StrictStr


class Message(Strict):
    """One turn. The fields below `name` exist because clients send answers back as they got them."""

    role: StrictStr
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """Without what is None: the tokenizer refuses a message without content, by its place."""
        content = "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content
        given = {"role": self.role, "content": content, "name": self.name}
        return {key: value for key, value in given.items() if value is not None}


class PlainText(Strict):
    type: Literal["text"]


class ChatCompletionBody(CommonBody):
    messages: list[Message]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    # OpenAI's fields that are not served, with the values that ask for nothing: many clients send them.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: PlainText | None = None
    modalities: tuple[Literal["text"]] | None = None

    def ask(self) -> Ask:
        """Raises InvalidRequest for fields that contradict each other."""
        return Ask(
            prompt=ChatPrompt(tuple(message.plain() for message in self.messages)),
            sampling=self.sampling(self._max_tokens(), self._logprobs()),
            model=self.model,
            want_record=self.pdserve_record,
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
    best_of: Always1 | None = None
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    suffix: None = None

    def asks(self) -> tuple[Ask, ...]:
        """One for each prompt. Raises InvalidRequest for fields that contradict each other."""
        prompts = prompts_of(self.prompt)
        if self.echo and self.logprobs is not None:
            problem = "log probabilities of a prompt are not computed"
            raise refused("echo", problem, "leave out echo, or logprobs", "PROMPT_LOGPROBS")
        if self.pdserve_record and len(prompts) > 1:
            raise refused("pdserve_record", "there is one for each request", "send one prompt")
        sampling = self._sampling()
        return tuple(Ask(prompt, sampling, self.model, want_record=self.pdserve_record) for prompt in prompts)

    def _sampling(self) -> SamplingParams:
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.max_tokens is None and self.min_tokens is not None:
            max_tokens = max(max_tokens, self.min_tokens)
        return self.sampling(max_tokens, self.logprobs)


def prompts_of(value: Any) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Raises InvalidRequest naming the entry that is neither text nor token ids."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise refused("prompt", f"a {type(value).__name__} is no prompt", "send text or token ids")
    if not value:
        raise refused("prompt", "the prompt is empty", "send some text", "EMPTY_PROMPT")
    if type(value[0]) is int:
        return (_tokens(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        problem = f"there are {len(value)} prompts"
        raise refused("prompt", problem, f"send at most {MAX_PROMPTS} in one request", "TOO_MANY_PROMPTS")
    return tuple(_prompt(item, f"prompt[{n}]") for n, item in enumerate(value))


def _prompt(value: Any, where: str) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        raise refused(where, f"a {type(value).__name__} is no prompt", "send text or token ids")
    return _tokens(value, where)


def _tokens(value: list[Any], where: str) -> TokenPrompt:
    """What is an id of the model is the intake's to know; more than 31 bits never are."""
    if all(type(item) is int and -(2**31) <= item < 2**31 for item in value):
        return TokenPrompt(tuple(value))
    position = next(n for n, item in enumerate(value) if not (type(item) is int and -(2**31) <= item < 2**31))
    raise refused(f"{where}[{position}]", f"{shown(value[position])} is no token id", "send token ids only")


_CHAT_NEUTRAL = NEUTRAL | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "modalities"}
_TEXT_NEUTRAL = NEUTRAL | {"suffix"}


def parse_chat(data: bytes) -> ChatCompletionBody:
    """Raises InvalidRequest naming the first field that cannot be taken."""
    return _checked(parse(data, ChatCompletionBody, neutral=_CHAT_NEUTRAL))


def parse_completion(data: bytes) -> CompletionBody:
    """Raises InvalidRequest naming the first field that cannot be taken."""
    return _checked(parse(data, CompletionBody, ids="prompt", neutral=_TEXT_NEUTRAL))


parse_body = parse_chat


def _checked(body: Body) -> Body:
    if isinstance(body, CommonBody):
        body.check_stream()
    return body
