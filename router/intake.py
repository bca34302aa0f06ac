"""From what a caller asked to a checked request: every check that can be made before a worker is called."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pdserve.errors import InvalidRequest, NotFound, Unavailable, shown
from pdserve.request import SamplingParams, check_token_ids
from pdserve.tokenizer import Tokenizer
from router.gate import Match, Member, Verdict, explain
from router.placement import Room, check_prompt_length, widest
from router.pool import Pool
from router.request import Ask, Request, router_full
from router.settings import RouterSettings
from router.tokens import BundleCache, encode, holders, unknown_model


class Intake:
    def __init__(self, pool: Pool, bundles: BundleCache, settings: RouterSettings) -> None:
        self._pool = pool
        self._bundles = bundles
        self._settings = settings
        self._taking = 0  # requests that are being checked and tokenized now

    async def take(self, ask: Ask) -> Request:
        """Checks, chooses the contract, tokenizes once, fixes seed and output limit.

        Raises:
            NotFound: unknown model or adapter.
            InvalidRequest: an option or token id out of range, an empty or too long prompt.
            Unavailable, Incompatible: no pair of workers can serve the model now.
            Exhausted: as many requests as may be active are being checked already.
        """
        if self._taking >= self._settings.max_active:
            raise router_full(self._taking)
        self._taking += 1
        try:
            return await self._take(ask)
        finally:
            self._taking -= 1

    async def _take(self, ask: Ask) -> Request:
        received = time.monotonic()
        ask.sampling.check()
        if ask.adapter:
            raise NotFound(
                f"adapter {shown(ask.adapter)} is not served",
                reason="UNKNOWN_ADAPTER",
                field="adapter",
                remedy="leave it out",
            )
        model = self._model(ask.model)
        ready = self._pool.ready(model)
        verdict = self._pool.verdict(model)
        if not verdict.matches:
            raise explain(ready, verdict, model)
        matches = favoured(verdict)
        contract = matches[0].prefills[0].record.contract
        tokenizer = await self.tokenizer(ready, contract.tokenizer_digest)
        limit = widest(matches)
        ids = await encode(ask.prompt, tokenizer, limit)
        check_prompt_length(len(ids), limit)
        check_token_ids(ids, contract.vocab_size)
        ask.sampling.check(contract.vocab_size)
        sampling, least = complete(ask.sampling, len(ids), limit, self._settings.default_max_tokens)
        timeout_s = min(self._settings.request_timeout_s, ask.timeout_s or float("inf"))
        return Request(
            id=f"req-{secrets.token_hex(12)}",
            model=model,
            tenant=self._settings.tenant,
            prompt_ids=ids,
            sampling=sampling,
            least_tokens=least,
            contract_digest=matches[0].contract_digest,
            received=received,
            deadline=received + timeout_s,
            label=ask.label,
            want_record=ask.want_record,
            notes=verdict.notes,
            tokenizer=tokenizer,
        )

    async def tokenizer(self, members: Sequence[Member], digest: bytes) -> Tokenizer | None:
        """None for models without one (an empty digest)."""
        return await self._bundles.get(digest, holders(members, digest)) if digest else None

    def _model(self, name: str) -> str:
        served = list(self._pool.models())
        if not served:
            raise Unavailable(
                "no worker has registered with this router",
                reason="NO_WORKER",
                field="model",
                remedy="start a prefill and a decode worker, or wait until they are ready",
            )
        if not name and len(served) == 1:
            return served[0]
        if not name:
            raise InvalidRequest(
                "several models are served",
                reason="MODEL_REQUIRED",
                field="model",
                remedy=f"name one of: {', '.join(served)}",
            )
        if name not in served:
            raise unknown_model(name, served)
        return name


def favoured(verdict: Verdict) -> tuple[Match, ...]:
    """The matches of the contract that most pairs share: one request keeps to one model and tokenizer."""
    votes: Counter[bytes] = Counter()
    for match in verdict.matches:
        votes[match.contract_digest] += len(match.prefills) * len(match.decodes)
    winner = max(sorted(votes), key=lambda digest: votes[digest])
    return tuple(match for match in verdict.matches if match.contract_digest == winner)


def complete(
    sampling: SamplingParams, prompt_tokens: int, limit: Room, default_max_tokens: int
) -> tuple[SamplingParams, int]:
    """Options with a seed and a max_tokens, and the fewest output tokens a pair must have room for.

    A max_tokens that the caller named and that some pair has room for is kept whatever happens. One
    that it did not name, or that is more than any pair has room for, is cut to what the pair leaves.

    Args:
        limit: the widest pair's.

    Raises InvalidRequest for a min_tokens beyond the room.
    """
    left = limit.total - prompt_tokens
    wanted = sampling.max_tokens or max(default_max_tokens, sampling.min_tokens)
    max_tokens = min(wanted, left)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"{sampling.min_tokens} is not allowed",
            reason="INVALID_MIN_TOKENS",
            field="min_tokens",
            remedy=f"use at most {max_tokens}, which is what the context leaves after {prompt_tokens} prompt tokens",
        )
    firm = sampling.max_tokens is not None and sampling.max_tokens <= left
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed, max_tokens=max_tokens), max_tokens if firm else max(1, sampling.min_tokens)
