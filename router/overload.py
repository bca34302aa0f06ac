"""Refuses at once what would wait too long, instead of letting queues grow until requests run out of time.

A request waits for the prompts before its own, and for a place in the steps of its decode worker. Both go on at once,
and both are foreseen in seconds: the first from the rates that workers publish (prediction.py), the second from
how long streams lasted lately. If either is above `max_wait_s`, the request is refused, and told when what waits now
will be done.

Where there are several tenants, what one of them has waiting at a worker, long prompts and short ones together, may be
as much as is left to `max_wait_s`, or to the worker's queue: the dynamic threshold that quotas.py has for places. Who
floods the router alone gets half, others find the other half. As much as an equal part, with room for one tenant more,
is anybody's, however little is left; who has nothing there is refused last.

Nothing is refused while it is not measured how long it would wait. A request that was taken is never refused here when
it has to move to another pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.errors import Exhausted
from pdserve.registry.records import Load
from router.gate import Pair
from router.pool import Job, Pool
from router.request import Request

OVERLOADED = "OVERLOADED"
_WEIGHT = 1 / 16  # of the last stream, in how long they last
_LONGEST_S = 3600.0  # beyond `max_wait_s`: what workers say of their rates may come to anything, also infinity


class Overload:
    """Belongs to one event loop.

    Args:
        max_wait_s: 0: nothing is refused.
        tenants: how many there are.
    """

    def __init__(self, pool: Pool, max_wait_s: float, tenants: int) -> None:
        self._pool = pool
        self._max_wait_s = max_wait_s
        self._several = tenants > 1
        self._stream_s = 0.0  # from a first token to the end

    def streamed(self, seconds: float) -> None:
        """An answer has ended so long after its first token."""
        self._stream_s += _WEIGHT * (seconds - self._stream_s) if self._stream_s else seconds

    def check(self, request: Request, pair: Pair) -> None:
        """Raises Exhausted (OVERLOADED) with the time to wait, for a request that has not been begun."""
        if not self._max_wait_s:
            return
        choice = pair.choice
        if choice.measured:
            parts = self._pool.parts(pair.prefill, lambda job: job.prompt_tokens)
            self._check(request.tenant, choice.wait_s, choice.queue_s, self._pool.load(pair.prefill), parts)
        decode = self._pool.load(pair.decode)
        wait_s = place_wait_s(decode, self._stream_s)
        self._check(request.tenant, wait_s, wait_s, decode, self._pool.parts(pair.decode, stream_count))

    def _check(self, tenant: str, wait_s: float, queue_s: float, load: Load, parts: Mapping[str, float]) -> None:
        """One of the two waits at a worker.

        Args:
            wait_s: of this request.
            queue_s: of one that all others go before.
            parts: of what waits, by tenant.
        """
        wait_s, queue_s = (min(each, self._max_wait_s + _LONGEST_S) for each in (wait_s, queue_s))
        if wait_s > self._max_wait_s:
            raise overloaded(f"it would wait {wait_s:.1f} s for others", wait_s)
        full = max(queue_s / self._max_wait_s, _filled(load))
        equal = 1 / (len(parts.keys() | {tenant}) + 1)
        if self._several and full * parts.get(tenant, 0.0) > max(1 - full, equal):
            raise overloaded(f"requests with the same key wait, for {queue_s:.1f} s with others", queue_s)


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
