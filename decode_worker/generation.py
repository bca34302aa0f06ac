"""One output from its first token to its end: sampler, text and stop rules.

The decode worker and the one-process runner both drive this class, so a rule about tokens,
text or endings exists once.

An output ends by the first of these, checked in this order after each token:
    stop    the token is an end id (unless `ignore_eos`) or a stop id; its own text is not given out
    stop    a stop string completed; text is cut before it
    stop    the output matches its grammar, and nothing can follow
    length  `limit` tokens were sampled
Ends and stop strings count from token `min_tokens` on; before it ends are not sampled, and
text passes the stop matcher by.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.grammar import Constraint, Grammars
from decode_worker.sampling import Choice, Sampler
from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc.events import LENGTH, STOP, Finish, TokenBatch, Usage
from pdserve.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer


def end_ids(params: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    """Ids that end an output under these options."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))


def check_endings(params: SamplingParams, eos_ids: Sequence[int], vocab_size: int, has_text: bool) -> None:
    """Raises InvalidRequest for stop rules that this model can never follow."""
    if params.stop and not has_text:
        raise InvalidRequest(
            "stop strings need text, and this model has no tokenizer",
            reason="NO_TOKENIZER",
            field="stop",
            remedy="use stop_token_ids",
        )
    if params.min_tokens and len(end_ids(params, eos_ids)) >= vocab_size:
        raise InvalidRequest(
            "every token of the vocabulary would end the output",
            reason="INVALID_MIN_TOKENS",
            field="min_tokens",
            remedy="ask for fewer stop_token_ids",
        )


def start(params: SamplingParams, grammars: Grammars | None, ends: frozenset[int]) -> Constraint | None:
    """Raises InvalidRequest where a grammar is asked for that cannot be followed."""
    if params.grammar is None:
        return None
    if grammars is None:
        raise InvalidRequest(
            "grammars are not followed here", reason="INVALID_GRAMMAR", field="grammar", remedy="leave it out"
        )
    return grammars.start(params.grammar, ends)


class Generation:
    """Mutable state of one output. Belongs to one thread at a time (see `Sampler`).

    Args:
        prompt: prompt ids.
        params: checked options.
        limit: tokens after which the output ends, at least 1.
        eos_ids: the model's end ids.
        tokenizer: None: no text, only ids.
        grammars: where `params.grammar` is compiled; may be None when there is none.
        choice: which of several outputs of one request.

    Raises InvalidRequest for a grammar that cannot be followed.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int,
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        grammars: Grammars | None = None,
        choice: int = 0,
    ) -> None:
        self.params = params
        self.choice = choice
        self.limit = limit
        self.output: list[int] = []
        self.finish: Finish | None = None
        self._prompt_tokens = len(prompt)
        self._ends = end_ids(params, eos_ids)
        self._constraint = start(params, grammars, self._ends)
        self.sampler = Sampler(params, prompt, self._ends, choice, self._constraint)
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, continuation=True, special=not params.skip_special_tokens)
        )
        self._matcher = StopMatcher(params.stop)

    def accept(self, choice: Choice) -> TokenBatch:
        """Takes the next token; returns it with the text it releases, and sets `finish` if it is the last."""
        index, token = len(self.output), choice.token
        self.output.append(token)
        self.sampler.record(token)
        text = self._advance(index, token)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        return TokenBatch(index, (token,), text, logprobs, self.choice)

    def replay(self, tokens: Sequence[int]) -> list[TokenBatch]:
        """Takes tokens that were sampled elsewhere through the same state; stops early if one ends the output."""
        batches = []
        for token in tokens:
            if self.finish is None:
                batches.append(self.accept(Choice(token)))
        return batches

    def usage(self) -> Usage:
        """How much of the prompt was not computed again is prefill's to tell, and the router's to add."""
        return Usage(self._prompt_tokens, len(self.output))

    def _advance(self, index: int, token: int) -> bytes:
        watching = index >= self.params.min_tokens
        if watching and token in self._ends:
            text = self._flush()
            self._end(STOP, stop_token_id=token)
            return text
        text, matched = b"" if self._detokenizer is None else self._detokenizer.push(token), None
        if watching:
            result = self._matcher.push(text)
            text, matched = result.release, result.matched
        whole = self._constraint is not None and self._constraint.complete
        if matched is not None:
            self._end(STOP, stop_string=matched)
        elif whole or len(self.output) >= self.limit:
            text += self._flush()
            self._end(STOP if whole else LENGTH)
        return text

    def _flush(self) -> bytes:
        """Everything held back. It cannot hold a stop string: the bytes are the start of one character."""
        rest = b"" if self._detokenizer is None else self._detokenizer.flush()
        return self._matcher.push(rest).release + self._matcher.flush()

    def _end(self, reason: str, stop_string: str | None = None, stop_token_id: int | None = None) -> None:
        self.finish = Finish(reason, self.usage(), stop_string, stop_token_id, self.choice)
