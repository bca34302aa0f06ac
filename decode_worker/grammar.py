"""Output that must match a grammar: which token may come next, by `llguidance` over our own tokens' bytes.

A grammar is compiled once per worker and content, whoever asks for it: it holds nothing of a tenant but its text, and
is kept only by that text. What one output has matched so far is a copy's state, which lives with the output: a
preempted or resumed output replays its tokens through it, and prefill knows nothing of it.

The mask of a step is computed where it is sampled, in the engine's thread; there the library runs without the GIL.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from pdserve.errors import Internal, InvalidRequest
from pdserve.request import JSON_SCHEMA, REGEX, Grammar
from pdserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_KEPT = 64  # compiled grammars of a worker

# A model may write JSON with any white space, but not for ever: a small one likes to.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}
_NO_END = 2**32 - 1


class Constraint:
    """Where one output stands in its grammar. `allowed` only reads, `advance` mutates: for whom, see `Sampler`.

    Args:
        ends: ids that end the output; allowed wherever the grammar may end, and they alone.
        own_ends: what the library takes for such ids.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int], own_ends: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._own_ends = np.asarray(own_ends, np.int64)
        self._vocab_size = vocab_size
        self._ends = ends
        self._end_ids = np.fromiter(sorted(ends), np.int64)

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab], true for ids that may come next. Raises Internal when the grammar outgrew its limits."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.zeros(self._vocab_size, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: known.size] = known
        allowed[self._own_ends] = False
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed

    def advance(self, token: int) -> None:
        """Takes the next output token; one that does not match shows as an error at the next `allowed`."""
        if token not in self._ends:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The output matches, and nothing can follow."""
        matcher = self._matcher
        return bool(matcher.is_stopped() and matcher.is_accepting() and not matcher.is_error())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Internal(
                f"the output cannot be kept to its grammar: {_first_line(self._matcher.get_error())}",
                reason="GRAMMAR_FAILED",
                field="grammar",
                remedy="use a simpler grammar",
            )


class Grammars:
    """Compiled grammars of one worker, the last used ones kept. Thread-safe.

    Args:
        tokenizer: None: the model has none, and no grammar can be followed.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, limit: int = MAX_KEPT) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limit = limit
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, grammar: Grammar, ends: frozenset[int] = frozenset()) -> Constraint:
        """A new output's constraint. May take a second for a grammar or a worker that is new: `prepare` in a thread.

        Raises InvalidRequest (INVALID_GRAMMAR) for a grammar that cannot be compiled.
        """
        matcher = self.prepare(grammar).deep_copy()
        own_ends = () if self._vocabulary is None else self._vocabulary.eos_tokens
        return Constraint(matcher, self._vocab_size, ends, [token for token in own_ends if token < self._vocab_size])

    def prepare(self, grammar: Grammar) -> LLMatcher:
        """Compiles it unless it is kept. Blocks; raises what `start` raises."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        matcher = self._compile(grammar)  # without the lock: others may be in a hurry, and twice does no harm
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        return matcher

    def has(self, grammar: Grammar) -> bool:
        return grammar in self._kept

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, _source(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask shows what compiling alone does not
        if matcher.is_error():
            raise InvalidRequest(
                _first_line(matcher.get_error()),
                reason="INVALID_GRAMMAR",
                field=grammar.kind,
                remedy="correct it, or leave out what is not supported",
            )
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "a grammar needs text, and this model has no tokenizer",
                reason="NO_TOKENIZER",
                field="grammar",
                remedy="leave it out",
            )
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)))


class _Vocabulary:
    """Our tokens as the library reads them. An id without text can never match."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self.tokens: Sequence[bytes] = [pieces.text(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token in range(tokenizer.vocab_size) if pieces.is_silent(token)]
        self.bos_token_id = tokenizer.bundle.bos_id
        # Which ids end an output is the constraint's to know; the library wants one, and a special one is never text.
        ends = [token for token in tokenizer.bundle.eos_ids if token < tokenizer.vocab_size]
        self.eos_token_id = next(iter([*ends, *self.special_token_ids]), _NO_END)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special=False))


def _source(grammar: Grammar) -> str:
    if grammar.kind == JSON_SCHEMA:
        # As canonical JSON: what the library is given becomes part of a larger text.
        return LLMatcher.grammar_from_json_schema(json.dumps(json.loads(grammar.text)), overrides=_JSON_OPTIONS)
    if grammar.kind == REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] or "it cannot be compiled"
