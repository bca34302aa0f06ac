"""What the bodies of both kinds of completion have in common: options of sampling, and how the answer comes.

Numbers are only typed here; their ranges are SamplingParams' business.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from pdserve.errors import shown
from pdserve.request import Grammar, SamplingParams
from pdserve.tokenizer.bundle import SAMPLING_NAMES
from router.openai_json import Strict, refused
from router.openai_messages import ResponseFormat, StructuredOutputs

Number = StrictFloat | StrictInt

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
    "skip_special_tokens",
)


class StreamOptions(Strict):
    include_usage: StrictBool | None = None
    include_obfuscation: Literal[False] | None = None  # events are not padded


class CommonBody(Strict):
    """OpenAI's options, and ours: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, ..."""

    model: StrictStr
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    n: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    seed: StrictInt | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None  # beside the text, and so an event for every step of a stream
    user: StrictStr | None = None  # this and the next three: labels of the caller's, taken and ignored
    safety_identifier: StrictStr | None = None
    metadata: dict[StrictStr, Any] | None = None
    prompt_cache_key: StrictStr | None = None  # prefixes are found by their content
    pdserve_record: StrictBool | None = None  # the handoff record, in the answer or in the last chunk of a stream
    skip_special_tokens: StrictBool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raises InvalidRequest for options of a stream without one."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "it needs stream", "set stream to true, or leave it out")

    @property
    def outputs(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def unset(self) -> frozenset[str]:
        return frozenset(name for name in SAMPLING_NAMES if getattr(self, name) is None)

    def grammar(self) -> Grammar | None:
        first = None if self.response_format is None else self.response_format.grammar_of()
        second = None if self.structured_outputs is None else self.structured_outputs.grammar_of()
        if first is not None and second is not None:
            raise refused("structured_outputs", "it is given together with response_format", "send one of them")
        return first or second

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequest for a key of logit_bias that is no token id, and for two grammars."""
        given = {name: value for name in _PLAIN_OPTIONS if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=() if not self.stop else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=self.grammar(),
            logit_bias={_token_id(key): _bias(bias) for key, bias in (self.logit_bias or {}).items()},
            **given,
        )


NEUTRAL = frozenset({"store", "service_tier"})  # fields that are taken where they ask for nothing
_STRUCTURED = "send structured_outputs"
_TEMPLATE = "send it in chat_template_kwargs, if the model's template knows it"
INSTEAD = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "reasoning_effort": _TEMPLATE,
    "enable_thinking": _TEMPLATE,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "max_new_tokens": "send max_tokens",
    "repeat_penalty": "send repetition_penalty",
    "extra_body": "send what is in it beside the other fields",
    "input": "send messages to /v1/chat/completions",
}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= _MAX_DIGITS):
        raise refused("logit_bias", f"{shown(key)} is not a token id", "use token ids as keys")
    return int(key)


def _bias(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise refused("logit_bias", f"{shown(value)} is too large", "use numbers from -100 to 100") from error
