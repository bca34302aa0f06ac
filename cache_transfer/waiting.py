"""Waits that can be bounded, ended early, and drained. Used by both ends of a handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from pdserve.errors import DeadlineExceeded, PdserveError


class Deadline:
    """Bounds a block by time, and lets others end it early with an error of their own.

        async with Deadline(limit_s) as deadline:
            deadline.extend(5.0, "the next frame")
            await ...

    One loop owns it. `interrupt` and a time that runs out cancel what the block awaits, and
    the block raises the given error, or DeadlineExceeded naming what was waited for.

    Args:
        limit_s: seconds for the whole block; `extend` never goes beyond.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._limit_at = 0.0
        self._waiting_for = "the handoff"
        self._timeout: asyncio.Timeout | None = None
        self._error: PdserveError | None = None

    async def __aenter__(self) -> Deadline:
        self.check()
        self._limit_at = asyncio.get_running_loop().time() + self._limit_s
        self._timeout = asyncio.timeout_at(self._limit_at)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            return
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            self.check()
            raise DeadlineExceeded(
                f"gave up waiting for {self._waiting_for}",
                remedy="see whether the other end lives; docs/protocol.md, section 11, has the limits",
            ) from None

    def extend(self, seconds: float, waiting_for: str) -> None:
        """The block may go on for so long from now, within its limit. Raises a pending error."""
        self.check()
        self._waiting_for = waiting_for
        if self._timeout is not None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(min(now + seconds, self._limit_at))

    def interrupt(self, error: PdserveError) -> None:
        """Ends the block with `error`, now or when it is entered. Only the first error counts."""
        if self._error is not None:
            return
        self._error = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raises the error of `interrupt`, if there was one."""
        if self._error is not None:
            raise self._error


async def settle(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Returns when all are done, failed or not. A cancellation meanwhile is raised afterwards.

    For work in threads, which no cancellation stops: memory it uses is free only after this.
    """
    waiting = tuple(futures)
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in waiting if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in waiting:
        if not future.cancelled():
            future.exception()  # marks it as seen; whoever started the work reports it
    if cancelled is not None:
        raise cancelled
