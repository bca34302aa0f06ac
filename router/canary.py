"""A request of the router's own through one pair of workers, to see that this pair works.

It takes the way of every request (attempt.py), except that its pair is given and not chosen, and that it gets one
attempt. Its prompt is the same for every pair of a contract, so the tokens can be compared; its tenant is new each
time, so nothing of it is found in a cache and the whole prompt is computed and travels. No quota and no figure of the
router's requests knows of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from dataclasses import dataclass

from pdserve.errors import DeadlineExceeded, Exhausted, Incompatible, NotFound, PdserveError, shown
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.events import AttemptRecord, PositionLogprobs, TokenBatch
from router.attempt import Attempts, failed
from router.backlog import Backlog
from router.channels import WorkerChannels
from router.gate import Member, Pair
from router.placement import room
from router.planner import Planner
from router.pool import Pool
from router.record import Account
from router.request import Request
from router.settings import RouterSettings

log = logging.getLogger(__name__)

TENANT = "pdserve-canary"  # then a random part: no key stands for it
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 8
SPREAD = 7919  # a prime, so that the prompt's ids are spread over any vocabulary


@dataclass(frozen=True)
class Sung:
    """What came of one canary."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]  # per token, of the best two log probabilities
    attempt: AttemptRecord
    error: PdserveError | None = None


class Canaries:
    """One at a time; belongs to the router's event loop. `counts`: how many ended how, since the start."""

    def __init__(self, pool: Pool, channels: WorkerChannels, settings: RouterSettings) -> None:
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._one_at_a_time = asyncio.Lock()
        self.counts: Counter[str] = Counter()

    async def sing(self, prefill: str, decode: str, limit_s: float) -> Sung:
        """Sends one through this pair; `prefill` empty: the decode worker computes the prompt.

        Raises NotFound for a worker that the router does not know, Incompatible for a pair that it would never use,
        Exhausted when those before it took all the time. What goes wrong on its way is in the answer.
        """
        pair = self._pair(prefill, decode)
        deadline = time.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise Exhausted(
                "other canaries are on their way", reason="CANARY_RUNNING", remedy="ask again", retry_after_ms=1000
            ) from None
        try:
            return await self._sing(pair, deadline)
        finally:
            self._one_at_a_time.release()

    async def _sing(self, pair: Pair, deadline: float) -> Sung:
        account = Account(canary(pair, deadline))
        account.verdict = self._pool.verdict(account.request.model)
        account.attempt(pair)
        backlog = Backlog(OUTPUT_TOKENS + 1)
        planner = Planner(self._pool, 1, 1, random.Random())  # it never finds another pair
        attempts = Attempts(self._pool, self._channels, self._settings, planner, account, backlog)
        error: PdserveError | None = None
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                account.end((await attempts.run(pair)).reason)
        except TimeoutError:
            error = DeadlineExceeded("it gave no complete answer in time", remedy="see what its workers do")
        except PdserveError as caught:
            error = caught
            if error is not account.last_error:
                failed(self._pool, account, pair.decode, error)
        if error is not None:
            account.end(error.reason)
        self.counts[account.outcome] += 1
        log.info("canary through %s and %s: %s", pair.prefill.id, pair.decode.id, account.outcome)
        batches = [event for event in backlog.taken() if isinstance(event, TokenBatch)]
        return Sung(
            ids=tuple(token for batch in batches for token in batch.ids),
            gaps=tuple(gap(position) for batch in batches for position in batch.logprobs),
            attempt=account.record().history[-1],
            error=error,
        )

    def _pair(self, prefill: str, decode: str) -> Pair:
        taker = self._member(decode, DECODE)
        if not prefill:
            if not taker.record.takes_prompts:
                raise Incompatible(f"{decode} computes no prompts", field="decode_worker", remedy="update that worker")
            return Pair(taker, taker)
        giver = self._member(prefill, PREFILL)
        if giver.record.model != taker.record.model or not self._pool.gate.fits(giver, taker):
            raise Incompatible(
                f"{prefill} may not hand to {decode}",
                field="prefill_worker",
                remedy="name a pair that `pdserve status` shows as fitting",
                differences=self._pool.gate.differences(giver, taker),
            )
        return Pair(giver, taker)

    def _member(self, worker_id: str, role: str) -> Member:
        for member in self._pool.members():
            if member.id == worker_id and member.record.role == role:
                return member
        raise NotFound(
            f"this router knows no {role} worker {shown(worker_id)}",
            reason="UNKNOWN_WORKER",
            field=f"{role}_worker",
            remedy="name one that `pdserve status` shows",
        )


def canary(pair: Pair, deadline: float) -> Request:
    """Its prompt fits any vocabulary and context; greedy, and with the log probabilities of the best two."""
    contract, limit = pair.decode.record.contract, room(pair)
    length = max(1, min(PROMPT_TOKENS, limit.prompt, limit.total - 1))
    tokens = max(1, min(OUTPUT_TOKENS, limit.total - length))
    return Request(
        id=f"canary-{secrets.token_hex(8)}",
        model=pair.decode.record.model,
        tenant=f"{TENANT}-{secrets.token_hex(8)}",
        prompt_ids=tuple(SPREAD * (n + 1) % contract.vocab_size for n in range(length)),
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=tokens, ignore_eos=True, logprobs=2),
        least_tokens=tokens,
        contract_digest=pair.decode.contract_digest,
        received=time.monotonic(),
        deadline=deadline,
        tokenizer_digest=contract.tokenizer_digest,
        vocab_size=contract.vocab_size,
    )


def gap(position: PositionLogprobs) -> float:
    """How far the best token is ahead of the second."""
    best = [top.logprob for top in position.top[:2]]
    return best[0] - best[1] if len(best) == 2 else 0.0
