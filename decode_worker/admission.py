"""Everything that is checked before a request may wait: no page, no ticket and no token before it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from cache_transfer.contract import HandoffIdentity, WorkerContract, arithmetic, check_compatible, prompt_digest
from decode_worker.generation import check_endings
from pdserve.errors import FieldDifference, InvalidRequest, Refused
from pdserve.request import MAX_CHOICES, SamplingParams, check_served, check_token_ids


@dataclass(frozen=True)
class Output:
    """One of several outputs of a prompt, as far as it has come."""

    choice: int
    output_ids: tuple[int, ...] = ()  # sampled elsewhere: replayed, and computed again here
    forwarded_tokens: int = 0


@dataclass(frozen=True)
class DecodeRequest:
    """`Decode/Generate`'s opening as the worker reads it."""

    request_id: str
    model: str  # empty: whatever this worker serves
    tenant: str
    adapter: bytes | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # sampled elsewhere: replayed
    forwarded_tokens: int  # of them, those the client already has: not sent again
    sampling: SamplingParams
    prefill_contract: WorkerContract  # this worker's own for a prompt that is computed here
    here: bool = False  # no handoff: this worker computes the prompt itself
    choices: tuple[Output, ...] = ()  # outputs of this prompt, of which only that is handed over; none: one, as above
    handoff_tokens: int = 0  # that the handoff brings; this worker computes the rest. 0: all

    @property
    def split(self) -> bool:
        """The handoff brings the beginning of the prompt only."""
        return self.handoff_tokens > 0

    @property
    def handoff_end(self) -> int:
        """Tokens of `ids` that a handoff brings."""
        return self.handoff_tokens or len(self.ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """What prefill computes: the prompt, then the output so far."""
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True)
class Limits:
    """What one worker can take."""

    model: str  # served name
    contract: WorkerContract
    context_limit: int  # tokens, prompt and output together
    pages: int
    page_size: int  # tokens
    eos_ids: tuple[int, ...]
    has_text: bool  # there is a tokenizer
    adapters: Container[bytes] = ()  # digests that new requests may use

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Admission:
    """What was found out about a request that may wait."""

    limit: int  # output tokens, those of `output_ids` included
    cache_tokens: int  # largest cache it will need; 0: logits only
    conversions: tuple[FieldDifference, ...]


def check_request(request: DecodeRequest, limits: Limits) -> Admission:
    """Refuses what this worker can never serve.

    Raises:
        NotFound: another model (UNKNOWN_MODEL), or an adapter that is not here (UNKNOWN_ADAPTER).
        Incompatible: prefill's contract differs; names the field.
        InvalidRequest: EMPTY_PROMPT, TOKEN_OUT_OF_RANGE, PROMPT_TOO_LONG, POOL_TOO_SMALL, INVALID_<sampling field>,
            NO_TOKENIZER, INVALID_OUTPUT_IDS, INVALID_CHOICES, INVALID_HANDOFF_TOKENS.
        Refused: NUMERICS_CHANGED, for a prompt that two workers of different arithmetic would compute together.
    """
    check_served(limits.model, request.model, request.adapter, limits.adapters)
    conversions = check_compatible(request.prefill_contract, limits.contract)
    vocab = limits.contract.vocab_size
    check_token_ids(request.prompt_ids, vocab, "prompt_ids")
    request.sampling.check(vocab)
    check_endings(request.sampling, limits.eos_ids, vocab, limits.has_text)
    limit = output_limit(len(request.prompt_ids), request.sampling, limits)
    _check_choices(request)
    for output in request.choices or (Output(0, request.output_ids, request.forwarded_tokens),):
        _check_output(output, request.sampling, limit, vocab)
    cache_tokens = len(request.prompt_ids) + limit - 1
    if request.split:
        _check_split(request, limits)
    if request.here or request.split:
        if limits.pages_for(cache_tokens) > limits.pages:
            raise _too_small(len(request.prompt_ids), limit, limits, "prompt_ids")
        return Admission(limit, cache_tokens, conversions)
    alone = limit - len(request.output_ids) <= 1  # the one token left needs logits only, for each choice too
    return Admission(limit, 0 if alone else cache_tokens, conversions)


def output_limit(prompt: int, sampling: SamplingParams, limits: Limits) -> int:
    """Output tokens this request may have: `max_tokens`, or what context and pool leave.

    The last token of an output is never cached, so the pool must hold prompt + output - 1 tokens.
    """
    context = limits.context_limit - prompt
    pool = limits.pages * limits.page_size - prompt + 1
    wanted = sampling.max_tokens
    if context < (wanted or 1):
        raise InvalidRequest(
            f"{prompt} prompt tokens and {wanted or 1} of output are more than the context of {limits.context_limit}",
            reason="PROMPT_TOO_LONG",
            field="prompt_ids" if context < 1 else "max_tokens",
            remedy=f"keep both together within {limits.context_limit} tokens",
        )
    if pool < (wanted or 1) and wanted != 1:
        raise _too_small(prompt, wanted or 1, limits, "prompt_ids" if pool < 1 else "max_tokens")
    limit = wanted or min(context, pool)
    if sampling.min_tokens > limit:
        raise InvalidRequest(
            f"{sampling.min_tokens} tokens are asked for, and there is room for {limit}",
            reason="INVALID_MIN_TOKENS",
            field="min_tokens",
            remedy=f"use at most {limit}",
        )
    return limit


def expected_identity(request: DecodeRequest, contract: WorkerContract, held_tokens: int) -> HandoffIdentity:
    """Which cache must arrive: that of the prompt and the output so far, or of the beginning of both, from
    `held_tokens` on.
    """
    return HandoffIdentity(
        contract_digest=contract.digest(),
        adapter_digest=request.adapter,
        tenant=request.tenant,
        prompt_digest=prompt_digest(request.ids[: request.handoff_end]),
        start=held_tokens,
        end=request.handoff_end,
    )


def cache_tokens_here(request: DecodeRequest, limit: int, limits: Limits) -> int:
    """Largest cache of a request whose handoff is given up, to compute its prompt here.

    Raises Refused (POOL_TOO_SMALL): its logits alone would have needed no page, and so many there are not.
    """
    tokens = len(request.prompt_ids) + limit - 1
    if limits.pages_for(tokens) > limits.pages:
        raise Refused(
            "this worker has too few pages to compute the prompt itself",
            reason="POOL_TOO_SMALL",
            field="prompt_ids",
            remedy="send it to a prefill worker, or to a decode worker with more pages",
            retryable=True,
        )
    return tokens


def check_same_numerics(prefill_contract: WorkerContract, request: DecodeRequest) -> None:
    """A later attempt may not bring other numerics, or kernels, than those that were admitted and reported.

    Raises Refused (NUMERICS_CHANGED), which another request may repair.
    """
    if arithmetic(prefill_contract) != arithmetic(request.prefill_contract):
        raise Refused(
            "this prefill worker computes with other numerics than the one that was admitted",
            reason="NUMERICS_CHANGED",
            field="prefill_contract",
            remedy="open a new request for that pair of workers",
            retryable=True,
        )


def _check_split(request: DecodeRequest, limits: Limits) -> None:
    if request.here or not 0 < request.handoff_tokens < len(request.ids):
        there = "no handoff is wanted" if request.here else f"there are {len(request.ids)} tokens"
        raise InvalidRequest(
            f"a handoff cannot bring {request.handoff_tokens} tokens where {there}",
            reason="INVALID_HANDOFF_TOKENS",
            field="handoff_tokens",
            remedy="leave it unset, or leave at least one token to this worker",
        )
    check_same_numerics(limits.contract, request)


def _check_choices(request: DecodeRequest) -> None:
    numbers = [output.choice for output in request.choices]
    problem = ""
    if numbers and (request.output_ids or request.forwarded_tokens):
        problem = "output_ids and forwarded_tokens are set beside them"
    elif len(set(numbers)) < len(numbers):
        problem = "two have one number"
    elif any(not 0 <= number < MAX_CHOICES for number in numbers):
        problem = f"{max(numbers)} is not below {MAX_CHOICES}"
    if problem:
        remedy = f"send each of the outputs once, numbered below {MAX_CHOICES}, with what it has"
        raise InvalidRequest(problem, reason="INVALID_CHOICES", field="choices", remedy=remedy)


def _check_output(output: Output, sampling: SamplingParams, limit: int, vocab: int) -> None:
    if output.output_ids:
        check_token_ids(output.output_ids, vocab, "output_ids")
    done = len(output.output_ids)
    if done > limit:
        raise _bad_output("output_ids", f"{done} tokens are more than the {limit} asked for")
    if output.forwarded_tokens > done:
        raise _bad_output("forwarded_tokens", f"{output.forwarded_tokens} tokens of {done} cannot have been sent")
    if sampling.logprobs is not None and output.forwarded_tokens < done:
        # Their logits are gone, and a token without the figures asked for would be a silent loss.
        raise _bad_output("forwarded_tokens", "output with logprobs can only be replayed as far as it was sent")


def _too_small(prompt: int, output: int, limits: Limits, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{prompt} prompt tokens and {output} of output are more than the page pool holds",
        reason="POOL_TOO_SMALL",
        field=name,
        remedy=f"keep both together within {limits.pages * limits.page_size} tokens, or give the worker more pages",
    )


def _bad_output(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_OUTPUT_IDS", field=name, remedy="send what the last worker streamed")
