"""The body of /v1/chat/completions: what is understood, checked by name, as a typed request.

Unknown fields are refused, because an option that is silently ignored looks as if it worked.
Numbers are only typed here; their ranges are SamplingParams' business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

from pdserve.errors import MAX_SHOWN, InvalidRequest, shown
from pdserve.request import MAX_LOGPROBS, SamplingParams
from router.request import Ask, ChatPrompt

Number = StrictFloat | StrictInt
Always1 = Annotated[StrictInt, Field(ge=1, le=1)]

MAX_ENTRIES = 20_000  # of all lists and objects of a body together
_FEW_ENTRIES_BYTES = 2 * MAX_ENTRIES  # an entry is at least a digit and a comma
_MAX_DIGITS = 10  # of a token id


# Options that have the same name and meaning in SamplingParams.
_PLAIN_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: StrictStr


class Message(_Strict):
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


class StreamOptions(_Strict):
    include_usage: StrictBool = False


class PlainText(_Strict):
    type: Literal["text"]


class _Neutral(_Strict):
    """OpenAI's fields that are not served, with the values of theirs that ask for nothing: many clients send them."""

    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: PlainText | None = None
    modalities: tuple[Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[StrictStr, Any], Field(max_length=0)] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatCompletionBody(_Neutral):
    """OpenAI's fields that are served, and ours: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, ..."""

    model: StrictStr
    messages: list[Message]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    n: Always1 | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    seed: StrictInt | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None  # accepted and ignored: a label of the caller's, never an identity
    pdserve_record: StrictBool = False  # the handoff record, in the answer or in the last chunk of a stream

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def ask(self) -> Ask:
        """Raises InvalidRequest for fields that contradict each other."""
        return Ask(
            prompt=ChatPrompt(tuple(message.plain() for message in self.messages)),
            sampling=self.sampling(),
            model=self.model,
            want_record=self.pdserve_record,
        )

    def sampling(self) -> SamplingParams:
        given = {name: value for name in _PLAIN_OPTIONS if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=self._max_tokens(),
            logprobs=self._logprobs(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias={_token_id(key): _bias(bias) for key, bias in (self.logit_bias or {}).items()},
            **given,
        )

    def _max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            problem = f"{shown(old)} contradicts max_completion_tokens ({shown(new)})"
            raise _refused("max_tokens", problem, "send only one of them")
        return old if new is None else new

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("top_logprobs", "it needs logprobs", "set logprobs to true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise _refused("top_logprobs", f"{shown(self.top_logprobs)} is not allowed", f"use 0 to {MAX_LOGPROBS}")
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_body(data: bytes) -> ChatCompletionBody:
    """Raises InvalidRequest naming the first field that is unknown, missing or of the wrong type."""
    try:
        if len(data) > _FEW_ENTRIES_BYTES:
            _check_marks(data)
            _check_entries(from_json(data))
        body = ChatCompletionBody.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from error
    except ValueError as error:  # from_json's; ValidationError is one, too
        raise _not_json(str(error)) from error
    if body.stream_options is not None and not body.stream:
        raise _refused("stream_options", "it needs stream", "set stream to true, or leave it out")
    return body


def _explain(problem: Any) -> InvalidRequest:
    where = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _refused(where, "this field is not supported", "leave it out", "UNKNOWN_FIELD")
    if problem["loc"] and problem["loc"][0] in _Neutral.model_fields:
        return _refused(str(problem["loc"][0]), "what it asks for is not supported", "leave it out", "UNKNOWN_FIELD")
    if where == "n":
        return _refused("n", "only 1 is supported", "leave it out")
    if problem["type"] == "missing":
        return _refused(where, "this field is missing", "send it", "MISSING_FIELD")
    if problem["type"] == "json_invalid":
        return _not_json(problem["ctx"]["error"])
    return _refused(where, str(problem["msg"]).lower(), "correct it")


def _not_json(problem: str) -> InvalidRequest:
    return _refused("", f"the body is not JSON: {problem}", "send a JSON object", "INVALID_JSON")


def _check_marks(data: bytes) -> None:
    """What parsing would cost is refused before: a body of brackets makes millions of objects in one go.

    A body of n entries has at most n commas, n + 1 opening brackets, and two strings for each entry.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # from here on every quote begins or ends a string
    if plain.count(b'"') <= 4 * (MAX_ENTRIES + 1):
        outside = b"".join(plain.split(b'"')[::2])
        if outside.count(b",") <= MAX_ENTRIES and outside.count(b"[") + outside.count(b"{") <= MAX_ENTRIES + 1:
            return
    raise _too_many_entries()


def _too_many_entries() -> InvalidRequest:
    problem = f"its lists and objects have more than {MAX_ENTRIES} entries"
    return _refused("body", problem, "send fewer", "TOO_MANY_ENTRIES")


def _check_entries(body: Any) -> None:
    """Raises InvalidRequest for more than MAX_ENTRIES: checking each against the schema would stop all other work."""
    left = MAX_ENTRIES
    todo = [body]
    while todo:
        value = todo.pop()
        if isinstance(value, (dict, list)):
            left -= len(value)
            if left < 0:
                raise _too_many_entries()
            todo += value.values() if isinstance(value, dict) else value


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content; without the type names that a union adds."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "int", "float") and not part.startswith(("list[", "constrained-", "function-")):
            text += f".{part}" if text else part
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _token_id(key: str) -> int:
    if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= _MAX_DIGITS):
        raise _refused("logit_bias", f"{shown(key)} is not a token id", "use token ids as keys")
    return int(key)


def _bias(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise _refused("logit_bias", f"{shown(value)} is too large", "use numbers from -100 to 100") from error


def _refused(field: str, problem: str, remedy: str, reason: str = "INVALID_FIELD") -> InvalidRequest:
    return InvalidRequest(problem, reason=reason, field=field, remedy=remedy)
