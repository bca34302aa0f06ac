"""What a caller may ask of a model. Standard library only; checked once, before any work."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from pdserve.errors import InvalidRequest, NotFound, shown

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_TOKEN_ENTRIES = 1024  # of logit_bias, and of stop_token_ids
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 128  # outputs of one prompt
MAX_ID_CHARACTERS = 256  # of a request's id between router and workers

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"  # kinds of grammar, by the option that sets them


@dataclass(frozen=True)
class Grammar:
    """What the whole output must match."""

    kind: str  # JSON_SCHEMA | REGEX | LARK
    text: str  # the schema as JSON, the expression, or the grammar's rules

    def check(self) -> None:
        """Raises InvalidRequest naming the kind. Whether it can be followed is the decode worker's to find out."""
        if self.kind not in (JSON_SCHEMA, REGEX, LARK):
            raise _invalid("grammar", self.kind, f"one of {JSON_SCHEMA}, {REGEX}, {LARK}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise _bad_grammar(self.kind, "a lone surrogate is not a character", "send valid Unicode") from error
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise _bad_grammar(self.kind, f"it has {size} bytes", f"use 1 to {MAX_GRAMMAR_BYTES} bytes")
        if self.kind != JSON_SCHEMA:
            return
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise _bad_grammar(self.kind, f"not JSON: {error}", "send a JSON schema") from error
        if not isinstance(schema, (dict, bool)):
            raise _bad_grammar(self.kind, f"a {type(schema).__name__} is no schema", "send a JSON object")


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen, and when output ends.

    Filters apply in this order: grammar, bias, penalties, temperature, min-p, top-k, top-p.
    `seed` None means "the router picks one"; workers always see a number.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None  # None: the server's own limit, as far as the context leaves room
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token and the n best
    grammar: Grammar | None = None
    skip_special_tokens: bool = True  # False: their names are part of the text, save the end's

    def check(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest naming the first field out of range."""
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k < 0:
            raise _invalid("top_k", self.top_k, "an integer of at least 0, where 0 keeps all")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise _invalid("seed", self.seed, "an integer in [0, 2^64)")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _invalid("max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0:
            raise _invalid("min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({shown(self.max_tokens)})")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _invalid("logprobs", self.logprobs, f"between 0 and {MAX_LOGPROBS}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _invalid("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not 0 < len(text.encode()) <= MAX_STOP_BYTES:
                raise _invalid("stop", text, f"strings of 1 to {MAX_STOP_BYTES} bytes")
        for name, count in (("logit_bias", len(self.logit_bias)), ("stop_token_ids", len(self.stop_token_ids))):
            if count > MAX_TOKEN_ENTRIES:
                raise _invalid(name, count, f"at most {MAX_TOKEN_ENTRIES} entries")
        for token, bias in self.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _number("logit_bias", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _token("stop_token_ids", token, vocab_size)
        if self.grammar is not None:
            self.grammar.check()


def check_choices(n: int) -> None:
    """Raises InvalidRequest for a number of outputs that no request may have."""
    if not 1 <= n <= MAX_CHOICES:
        raise _invalid("n", n, f"1 to {MAX_CHOICES}")


def check_token_ids(ids: tuple[int, ...], vocab_size: int, name: str = "prompt") -> None:
    """Raises InvalidRequest for an empty prompt or the first id outside the vocabulary."""
    if not ids:
        raise InvalidRequest(
            "the prompt has no tokens", reason="EMPTY_PROMPT", field=name, remedy="send at least one token"
        )
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"id {token} at position {position} is outside the vocabulary",
                reason="TOKEN_OUT_OF_RANGE",
                field=name,
                remedy=f"use ids from 0 to {vocab_size - 1}",
            )


def check_request_id(text: str) -> None:
    """Raises InvalidRequest for an id that a worker does not take."""
    if not 0 < len(text) <= MAX_ID_CHARACTERS:
        raise InvalidRequest(
            f"has {len(text)} characters",
            reason="INVALID_REQUEST_ID",
            field="request_id",
            remedy=f"send 1 to {MAX_ID_CHARACTERS} characters",
        )


def check_served(served: str, model: str, adapter: bytes | None, adapters: Container[bytes] = ()) -> None:
    """Raises NotFound for another model than the worker serves (empty: any), or an adapter that it has not.

    Args:
        adapters: digests that new requests may use.
    """
    if model and model != served:
        raise NotFound(
            f"this worker serves {served!r}, not {model!r}",
            reason="UNKNOWN_MODEL",
            field="model",
            remedy="ask a worker whose record names the model",
        )
    if adapter is not None and adapter not in adapters:
        raise unknown_adapter(adapter)


def unknown_adapter(digest: bytes) -> NotFound:
    """For work that names a version of an adapter that is not here; another worker may have it."""
    return NotFound(
        f"this worker has no adapter {digest.hex()[:16]}",
        reason="UNKNOWN_ADAPTER",
        field="adapter_digest",
        remedy="load it, or ask for the base model",
        retryable=True,
    )


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = low <= value <= high and not (open_low and value == low)  # no bound holds for NaN
    if not inside:
        bracket = "(" if open_low else "["
        raise _invalid(name, value, f"a number in {bracket}{low:g}, {high:g}]")


def _token(name: str, token: int, vocab_size: int | None) -> None:
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        limit = "the vocabulary" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise _invalid(name, token, f"token ids inside {limit}")


def _invalid(name: str, value: object, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{shown(value)} is not allowed", reason=f"INVALID_{name.upper()}", field=name, remedy=f"use {expected}"
    )


def _bad_grammar(kind: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_GRAMMAR", field=kind, remedy=remedy)
