"""Frames through shared memory: a thread fills slot after slot for as long as some are free and something is computed.

The event loop plans frames, starts that thread when it has ended for want of either, and wakes the receiver's with
`Queued` when that has found the queue empty. Between the two threads themselves nothing passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from cache_transfer.messages import FrameHeader, Queued
from cache_transfer.packing import Cargo
from cache_transfer.shared import Ring
from cache_transfer.shared_queue import LINGERS, RUNS, SLEEPS
from cache_transfer.transport import PushStream

_JOB_BYTES = 32 << 20  # then the thread gives way to other handoffs


class RingFrames:
    """Args: `ring`: agreed to by the receiver."""

    def __init__(self, cargo: Cargo, ring: Ring) -> None:
        self._cargo = cargo
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._planned: deque[FrameHeader] = deque()  # the loop appends, the thread takes
        self._wake = False  # the receiver waits for `Queued`
        self._job: asyncio.Future[None] | None = None

    async def send(self, stream: PushStream) -> None:
        """Returns when all frames were announced and stand in the queue."""
        cargo = self._cargo
        while True:
            self._planned.extend(cargo.outbox.take_all(cargo.max_payload_bytes))
            if self._job is not None and self._job.done():
                self._job.result()
                self._job = None
            if self._job is None and self._planned and self._has_room(SLEEPS):
                self._job = cargo.start(self._fill)
                self._job.add_done_callback(lambda _: cargo.changed.set())
            if self._wake:
                self._wake = False
                await stream.send(Queued(self._ring.packed))
            elif self._job is None and not self._planned and cargo.outbox.done:
                return
            else:
                began, busy = time.monotonic(), bool(self._planned or self._job)
                await cargo.next_change()
                cargo.seconds += time.monotonic() - began if busy else 0.0

    def _has_room(self, how: int) -> bool:
        """Whether a slot is free; if not, the receiver knows how this side waits until half of them are."""
        if self._ring.has_room() or (how == LINGERS and self._ring.queue.look() and self._ring.has_room()):
            return True
        self._ring.queue.want(self._ring.packed - self._ring.slots // 2)
        self._ring.queue.waits(how)
        if not self._ring.has_room():
            return False
        self._ring.queue.waits(RUNS)
        return True

    def _fill(self) -> None:
        """Runs in a worker thread."""
        filled = 0
        self._ring.queue.waits(RUNS)
        while self._planned and not self._cargo.stopped and filled < _JOB_BYTES:
            if self._has_room(LINGERS):
                filled += self._put_one()
            else:
                self._ring.queue.linger()
                self._ring.queue.waits(RUNS)
                if not self._has_room(SLEEPS):
                    break

    def _put_one(self) -> int:
        """Bytes of its payload."""
        frame, wake = self._ring.put(self._cargo.unpacked(self._planned.popleft()), self._cargo.secret)
        self._cargo.manifest.add(frame.digest, frame.size)
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the handoff over with it
                self._loop.call_soon_threadsafe(self._on_wake)
        return frame.size

    def _on_wake(self) -> None:
        self._wake = True
        self._cargo.changed.set()
