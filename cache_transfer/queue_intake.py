"""The frames of one attempt that come through the queue in shared memory, and in no other way.

A thread takes, checks, verifies and writes them, one after the other, for as long as there are some; the event loop
hears of nothing. `Queued` only starts it again once it has found the queue empty.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from cache_transfer.intake import AnyIntake, FrameMessage, Incoming
from cache_transfer.jobs import Job, Jobs
from cache_transfer.messages import Queued
from cache_transfer.refusals import out_of_order
from cache_transfer.shared_queue import LINGERS, RUNS, SLEEPS, Queue

_JOB_BYTES = 32 << 20  # then the thread gives way to other handoffs, and the event loop has a say


class QueueIntake(AnyIntake):
    def __init__(self, incoming: Incoming, queue: Queue) -> None:
        super().__init__(incoming)
        self.grant = replace(self.grant, queue=True)
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._jobs = Jobs(incoming.executor, incoming.rights, self._find, lambda _: None)

    async def take(self, message: FrameMessage) -> None:
        if not isinstance(message, Queued):
            raise out_of_order(message, "a queued frame or logits")
        self._jobs.check()
        self._jobs.start()

    async def _all_written(self) -> None:
        await self._jobs.finish()

    async def _still(self) -> None:
        await self._jobs.drain()

    def _find(self) -> Job | None:
        return self._run if self._more(SLEEPS) else None

    def _more(self, how: int) -> bool:
        """Whether a frame is there; if not, the sender knows how this side waits for one."""
        if self._is_one_there() or (how == LINGERS and self._queue.look() and self._is_one_there()):
            return True
        self._queue.waits(how)
        if not self._is_one_there():
            return False
        self._queue.waits(RUNS)
        return True

    def _is_one_there(self) -> bool:
        return self._queue.announced(self._written) > self._written

    def _run(self) -> int:
        """Runs in a worker thread, which alone counts `_written` meanwhile. A frame is written only once verified."""
        most = self.manifest.payload_bytes + _JOB_BYTES
        self._queue.waits(RUNS)
        while not self._jobs.stopped and self.manifest.payload_bytes < most:
            if self._coverage.complete and not self._is_one_there():
                break
            if self._more(LINGERS):
                self._take_one()  # or refuses one that is too many
            else:
                self._queue.linger()
                self._queue.waits(RUNS)
                if not self._more(SLEEPS):
                    break
        return self._written

    def _take_one(self) -> None:
        frame = self._queue.get(self._written)
        self._writer.write(self._accept(frame), frame)
        self._written += 1
        if self._queue.finish(self._written):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the attempt over with it
                self._loop.call_soon_threadsafe(self._tell)
