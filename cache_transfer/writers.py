"""Verifies frames and writes them into pages, in threads, for one attempt.

Queue: frames of one attempt. Producer: the receiver. Consumer: one job at a time on the receiver's
thread pool, with every frame that waited when it started. Bound: that job's frames and those that
wait, each of about `_BATCH_BYTES`. Few bytes between the wire and the pages stay in the processor's
caches: one job and small batches were a fifth faster than two jobs and 4 MiB.

Fencing: a job starts only after `Rights.may_write` said yes in the same step of the event loop, and
`drain` waits for every job that started. So once an attempt was revoked, no job starts, and
once `drain` returned, none runs: its pages are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from cache_transfer import digests
from cache_transfer.checks import payload_of
from cache_transfer.messages import Frame, FrameHeader, SharedFrame
from cache_transfer.pages import PageSink
from cache_transfer.refusals import data_loss
from cache_transfer.shared import Shared
from cache_transfer.waiting import settle
from pdserve.errors import Internal, PdserveError

_BATCH_BYTES = 1 << 20

Batch = list[tuple[FrameHeader, Frame | SharedFrame]]


class Rights(Protocol):
    """What an attempt may do; its receiver says. Called on the event loop."""

    def may_write(self) -> None:
        """Raises when the attempt has lost the right to write."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """Ends the attempt."""
        ...


class Writers:
    """Owned by one receiving task.

    Args:
        rights: asked on the event loop before each job, and told of the first error of one.
        on_written: told, on the event loop, how many frames a job has written.
        shared: where the payloads of shared frames lie.
    """

    def __init__(
        self,
        executor: Executor,
        sink: PageSink,
        secret: bytes,
        rights: Rights,
        on_written: Callable[[int], None],
        shared: Shared | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._sink = sink
        self._secret = secret
        self._rights = rights
        self._on_written = on_written
        self._shared = shared
        self._room = bytearray()  # for one payload; the job's, and there is one at a time
        self._waiting: Batch = []
        self._waiting_bytes = 0
        self._job: asyncio.Future[int] | None = None
        self._stopped = False
        self._error: PdserveError | None = None

    async def put(self, frames: Batch) -> None:
        """Takes the frames of one message, whose headers were accepted; waits while the queue is full.

        Raises what `Rights.may_write` raises, or the error of an earlier frame.
        """
        while self._waiting_bytes >= _BATCH_BYTES and self._job is not None:
            await self._end_of_job(self._job)
        self._check()
        self._waiting += frames
        self._waiting_bytes += sum(frame.size for _, frame in frames)
        self._start_job()

    async def finish(self) -> None:
        """Returns when every frame was verified and written; raises the first error instead."""
        while self._job is not None:
            await self._end_of_job(self._job)
        self._check()
        if self._waiting:
            raise Internal("a frame was not written")

    async def drain(self) -> None:
        """Drops what has not started and waits for what has. Idempotent; survives cancellation."""
        self._stopped = True
        self._waiting.clear()
        if self._job is not None:
            await settle((self._job,))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _end_of_job(self, job: asyncio.Future[int]) -> None:
        # The job's own callback, which may start the next, runs before this wait returns.
        await asyncio.wait((job,))

    def _start_job(self) -> None:
        if self._stopped or not self._waiting or self._job is not None:
            return
        self._rights.may_write()
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._job = self._loop.run_in_executor(self._executor, self._run, batch)
        self._job.add_done_callback(self._on_job_done)

    def _on_job_done(self, job: asyncio.Future[int]) -> None:
        self._job = None
        error = job.exception()
        if error is None:
            try:
                self._start_job()
                self._on_written(job.result())
            except PdserveError as refused:
                error = refused
        if error is not None:
            self._stopped = True
            if not isinstance(error, PdserveError):
                error = Internal(f"writing pages failed: {error!r}")
            self._error = self._error or error
            self._rights.on_error(error)

    def _run(self, batch: Batch) -> int:
        """Runs in a worker thread. A frame is written only after it verified. How many were written."""
        for number, (header, frame) in enumerate(batch):
            if self._stopped:
                return number
            if isinstance(frame, SharedFrame) and len(self._room) < frame.size:
                self._room = bytearray(frame.size)
            payload = payload_of(frame, self._shared, self._room)
            digest = digests.frame_digest(self._secret, frame.header, payload)
            if not digests.same(digest, frame.digest):
                problem = f"frame {header.seq} (plane {header.plane}, layer {header.layer}) did not verify"
                raise data_loss(problem, "FRAME_DIGEST", "frame")
            self._sink.write(header.plane, header.layer, header.heads, header.tokens, payload)
        return len(batch)
