"""Refuses at once what would wait too long, instead of letting queues grow until requests run out of time.

A request waits for the prompts before its own, and for a place in the steps of its decode worker. Both go on at once,
and both are foreseen in seconds: the first from the rates that workers publish (prediction.py), the second from
how long streams lasted lately. If either is above `max_wait_s`, the request is refused, and told when what waits now
will be done.

Where there are several tenants, it also counts what one of them has waiting at the worker, long prompts and short ones
together, as a part of `max_wait_s` or of the worker's queue; and what it was given there lately (lately.py):

    more than an equal part lately   it may have waiting as much as is left, and nothing when nothing is: the dynamic
                                     threshold that quotas.py has for places. Who floods the router gets half at most
    no more than that                half, as long as not everything is taken; an equal part, with room for one tenant
                                     more, always. With no more than this waiting it may wait half as long again

What waits of a tenant is a few requests, and a few more at times. So a threshold alone refuses every tenth of a
tenant that asks for a fifth of what the worker can do, only because a flood keeps the threshold low.

Nothing is refused while it is not measured how long it would wait. A request that was taken is never refused here when
it has to move to another pair.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.errors import Exhausted
from pdserve.registry.records import Load
from router.bucket import Clock
from router.gate import Member, Pair
from router.jobs import Job
from router.lately import Lately
from router.pool import Pool
from router.request import Request

OVERLOADED = "OVERLOADED"
_WEIGHT = 1 / 16  # of the last stream, in how long they last
_FADES = 5  # times `max_wait_s`: how long it counts what a tenant was given
_HALF = 1 / 2  # of `max_wait_s`, for a tenant that comes anew
_LONGER = 3 / 2  # times `max_wait_s`, for a tenant with no more than an equal part
_LONGEST_S = 3600.0  # beyond `max_wait_s`: what workers say of their rates may come to anything, also infinity


@dataclass(frozen=True)
class Standing:
    """Of a tenant at a worker. Parts are of 1."""

    part: float  # of what waits there, the tenant's
    tenants: int  # with something there, this one included
    lately: float  # of what the worker was given, the tenant's

    @property
    def equal(self) -> float:
        return 1 / (self.tenants + 1)

    @property
    def entitled(self) -> bool:
        return self.lately <= 1 / self.tenants

    def room(self, full: float) -> float:
        """What it may have waiting, of the whole, while so much is taken."""
        if not self.entitled:
            return 1 - full
        return max(1 - full, _HALF if full <= 1 else self.equal)

    def patience(self, full: float) -> float:
        """How long a request of it may wait, in `max_wait_s`."""
        return _LONGER if self.entitled and full * self.part <= self.equal else 1.0


class Overload:
    """Belongs to one event loop.

    Args:
        max_wait_s: 0: nothing is refused.
        tenants: how many there are.
    """

    def __init__(self, pool: Pool, max_wait_s: float, tenants: int, clock: Clock = time.monotonic) -> None:
        self._pool = pool
        self._max_wait_s = max_wait_s
        self._several = tenants > 1
        self._clock = clock
        self._stream_s = 0.0  # from a first token to the end
        self._prompts: dict[bytes, Lately] = {}  # tokens, by the incarnation that computes them
        self._streams: dict[bytes, Lately] = {}

    def streamed(self, seconds: float) -> None:
        """An answer has ended so long after its first token."""
        self._stream_s += _WEIGHT * (seconds - self._stream_s) if self._stream_s else seconds

    def admit(self, request: Request, pair: Pair) -> None:
        """For a request that has not been begun, and will be now: it counts as given to its tenant.

        Raises Exhausted (OVERLOADED) with the time to wait; then nothing counts.
        """
        if not self._max_wait_s:
            return
        prompts, streams = self._of(self._prompts, pair.prefill), self._of(self._streams, pair.decode)
        choice, tenant = pair.choice, request.tenant
        if choice.measured:
            parts = self._pool.parts(pair.prefill, lambda job: job.prompt_tokens)
            load = self._pool.load(pair.prefill)
            self._check(choice.wait_s, choice.queue_s, load, self._standing(tenant, parts, prompts))
        decode = self._pool.load(pair.decode)
        wait_s = place_wait_s(decode, self._stream_s)
        parts = self._pool.parts(pair.decode, stream_count)
        self._check(wait_s, wait_s, decode, self._standing(tenant, parts, streams))
        prompts.give(tenant, len(request.ids))
        streams.give(tenant, max(1, len(request.choices)))

    def _check(self, wait_s: float, queue_s: float, load: Load, standing: Standing) -> None:
        """One of the two waits at a worker.

        Args:
            wait_s: of this request.
            queue_s: of one that all others go before.
        """
        wait_s, queue_s = (min(each, self._max_wait_s + _LONGEST_S) for each in (wait_s, queue_s))
        full = max(queue_s / self._max_wait_s, _filled(load))
        if wait_s > self._max_wait_s * (standing.patience(full) if self._several else 1.0):
            raise overloaded(f"it would wait {wait_s:.1f} s for others", wait_s)
        if self._several and full * standing.part > standing.room(full):
            raise overloaded(f"requests with the same key wait, for {queue_s:.1f} s with others", queue_s)

    def _standing(self, tenant: str, parts: Mapping[str, float], lately: Lately) -> Standing:
        return Standing(parts.get(tenant, 0.0), len(parts.keys() | {tenant}), lately.part(tenant))

    def _of(self, known: dict[bytes, Lately], member: Member) -> Lately:
        incarnation = member.record.incarnation
        if incarnation not in known:
            there = {each.record.incarnation for each in self._pool.members()}
            for gone in known.keys() - there:
                del known[gone]
            known[incarnation] = Lately(_FADES * self._max_wait_s, self._clock)
        return known[incarnation]


def _filled(load: Load) -> float:
    return min(1.0, load.waiting / load.waiting_limit) if load.waiting_limit else 0.0


def stream_count(job: Job) -> int:
    """That a job has at a decode worker, besides its prompt."""
    return 0 if job.prompt_tokens else job.streams


def place_wait_s(load: Load, stream_s: float) -> float:
    """Until a decode worker's step has a place for one more stream, those counted that wait for their cache."""
    if not load.batch_limit:
        return 0.0
    return max(0, load.running + load.waiting + 1 - load.batch_limit) * stream_s / load.batch_limit


def overloaded(problem: str, wait_s: float) -> Exhausted:
    return Exhausted(
        problem,
        reason=OVERLOADED,
        field="router.max_wait_s",
        remedy="send the request again later",
        retry_after_ms=max(1, round(1000 * wait_s)),
    )
