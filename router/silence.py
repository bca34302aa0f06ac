"""Notices a decode worker that has given tokens and no longer does: one timer for a stream, nothing for a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from router.failures import stopped
from router.gate import Member
from router.pool import Pool

_UNKNOWN = -1  # engine steps at a look that was not made


class Silence:
    """Of one worker, on one event loop: `begins` when its next message is waited for, `ends` when that is there."""

    def __init__(self, pool: Pool, decode: Member, limit_s: float, scope: asyncio.Timeout) -> None:
        self._pool = pool
        self._decode = decode
        self._half_s = limit_s / 2
        self._scope = scope  # is over when the worker is given up
        self._loop = asyncio.get_running_loop()
        self._since = 0.0  # loop time; 0: it is not waited for
        self._looked_at = 0.0  # the silence of the last look
        self._steps: int | None = _UNKNOWN  # at the last look
        self._timer = self._loop.call_later(self._half_s, self._look)

    def begins(self) -> None:
        self._since = self._loop.time()

    def ends(self) -> None:
        self._since = 0.0

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """At the half of every long silence, and then after each further half."""
        now = self._loop.time()
        if self._since != self._looked_at:
            self._looked_at, self._steps = self._since, _UNKNOWN
        due = (self._since or now) + self._half_s
        if now >= due:
            before, self._steps = self._steps, self._pool.steps(self._decode)
            if self._steps == before:
                self._scope.reschedule(now)
                return
            due = now + self._half_s
        self._timer = self._loop.call_at(due, self._look)


@asynccontextmanager
async def watched(pool: Pool, decode: Member, limit_s: float) -> AsyncGenerator[Silence, None]:
    """Ends the block with Unavailable (INTER_TOKEN_TIMEOUT) in a silence of `limit_s` whose second half the engine
    stood still in, as far as the registry tells. One that steps is at work on other sequences, such as those for
    which this one has to wait.
    """
    try:
        async with asyncio.timeout(None) as scope:
            silence = Silence(pool, decode, limit_s, scope)
            try:
                yield silence
            finally:
                silence.stop()
    except TimeoutError as error:
        raise stopped(decode, limit_s) from error
