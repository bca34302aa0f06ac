"""Verifies frames and writes them into pages, in threads, for one attempt.

Queue: frames of one attempt. Producer: the receiver. Consumer: one job at a time (jobs.py) on the receiver's
thread pool, with every frame that waited when it started. Bound: that job's frames and those that
wait, each of about `_BATCH_BYTES`. Few bytes between the wire and the pages stay in the processor's
caches: one job and small batches were a fifth faster than two jobs and 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from cache_transfer import digests
from cache_transfer.checks import payload_of
from cache_transfer.jobs import Job, Jobs, Rights
from cache_transfer.messages import Frame, FrameHeader, SharedFrame
from cache_transfer.pages import PageSink
from cache_transfer.refusals import data_loss
from cache_transfer.shared import Shared
from pdserve.errors import Internal

_BATCH_BYTES = 1 << 20

Batch = list[tuple[FrameHeader, Frame | SharedFrame]]


class FrameWriter:
    """Verifies and writes one frame at a time. Used by one thread at a time.

    Args:
        shared: where the payloads of shared frames lie.
    """

    def __init__(self, sink: PageSink, secret: bytes, shared: Shared | None) -> None:
        self._sink = sink
        self._secret = secret
        self._shared = shared
        self._room = bytearray()  # for one payload

    def write(self, header: FrameHeader, frame: Frame | SharedFrame) -> None:
        """A frame whose header was accepted. Raises DataLoss (FRAME_DIGEST), with nothing written."""
        if isinstance(frame, SharedFrame) and len(self._room) < frame.size:
            self._room = bytearray(frame.size)
        payload = payload_of(frame, self._shared, self._room)
        digest = digests.frame_digest(self._secret, frame.header, payload)
        if not digests.same(digest, frame.digest):
            problem = f"frame {header.seq} (plane {header.plane}, layer {header.layer}) did not verify"
            raise data_loss(problem, "FRAME_DIGEST", "frame")
        self._sink.write(header.plane, header.layer, header.heads, header.tokens, payload)


class Writers:
    """Owned by one receiving task.

    Args:
        rights, on_written: as of Jobs.
    """

    def __init__(
        self, executor: Executor, writer: FrameWriter, rights: Rights, on_written: Callable[[int], None]
    ) -> None:
        self._writer = writer
        self._jobs = Jobs(executor, rights, self._find, on_written)
        self._waiting: Batch = []
        self._waiting_bytes = 0

    async def put(self, frames: Batch) -> None:
        """Takes the frames of one message, whose headers were accepted; waits while the queue is full.

        Raises what `Rights.may_write` raises, or the error of an earlier frame.
        """
        while self._waiting_bytes >= _BATCH_BYTES and self._jobs.running:
            await self._jobs.end_of_job()
        self._jobs.check()
        self._waiting += frames
        self._waiting_bytes += sum(frame.size for _, frame in frames)
        self._jobs.start()

    async def finish(self) -> None:
        """Returns when every frame was verified and written; raises the first error instead."""
        await self._jobs.finish()
        if self._waiting:
            raise Internal("a frame was not written")

    async def drain(self) -> None:
        """Drops what has not started and waits for what has. Idempotent; survives cancellation."""
        self._waiting.clear()
        await self._jobs.drain()

    def _find(self) -> Job | None:
        if not self._waiting:
            return None
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return partial(self._run, batch)

    def _run(self, batch: Batch) -> int:
        """Runs in a worker thread. A frame is written only after it verified. How many were written."""
        for number, (header, frame) in enumerate(batch):
            if self._jobs.stopped:
                return number
            self._writer.write(header, frame)
        return len(batch)
