"""Verifies frames and writes them into pages, in threads, for one attempt.

Queue: frames of one attempt. Producer: the receiver. Consumer: at most `_JOBS` jobs on the
receiver's thread pool, each with every frame that waited when it started. Bound: `_JOBS`
batches and one that waits, each of about `_BATCH_BYTES`.

Fencing: a job starts only after `may_write` said yes in the same step of the event loop, and
`drain` waits for every job that started. So once an attempt was revoked, no job starts, and
once `drain` returned, none runs: its pages are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from cache_transfer import digests
from cache_transfer.messages import Frame, FrameHeader
from cache_transfer.pages import PageSink
from cache_transfer.refusals import data_loss
from cache_transfer.waiting import settle
from pdserve.errors import Internal, PdserveError

_BATCH_BYTES = 4 << 20
_JOBS = 2

_Batch = list[tuple[FrameHeader, Frame]]


class Writers:
    """Owned by one receiving task.

    Args:
        may_write: raises when the attempt has lost the right to write.
        on_error: told, on the event loop, of the first error of a job.
    """

    def __init__(
        self,
        executor: Executor,
        sink: PageSink,
        secret: bytes,
        may_write: Callable[[], None],
        on_error: Callable[[PdserveError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._sink = sink
        self._secret = secret
        self._may_write = may_write
        self._on_error = on_error
        self._waiting: _Batch = []
        self._waiting_bytes = 0
        self._jobs: set[asyncio.Future[None]] = set()
        self._stopped = False
        self._error: PdserveError | None = None

    async def put(self, header: FrameHeader, frame: Frame) -> None:
        """Takes a frame whose header was accepted; waits while the queue is full.

        Raises what `may_write` raises, or the error of an earlier frame.
        """
        while self._waiting_bytes >= _BATCH_BYTES and self._jobs:
            await self._one_job()
        self._check()
        self._waiting.append((header, frame))
        self._waiting_bytes += len(frame.payload)
        self._start_job()

    async def finish(self) -> None:
        """Returns when every frame was verified and written; raises the first error instead."""
        while self._jobs:
            await self._one_job()
        self._check()
        if self._waiting:
            raise Internal("a frame was not written")

    async def drain(self) -> None:
        """Drops what has not started and waits for what has. Idempotent; survives cancellation."""
        self._stopped = True
        self._waiting.clear()
        await settle(tuple(self._jobs))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _one_job(self) -> None:
        # The job's own callback, which may start the next, runs before this wait returns.
        await asyncio.wait(self._jobs, return_when=asyncio.FIRST_COMPLETED)

    def _start_job(self) -> None:
        if self._stopped or not self._waiting or len(self._jobs) >= _JOBS:
            return
        self._may_write()
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        job = self._loop.run_in_executor(self._executor, self._run, batch)
        self._jobs.add(job)
        job.add_done_callback(self._on_job_done)

    def _on_job_done(self, job: asyncio.Future[None]) -> None:
        self._jobs.discard(job)
        error = job.exception()
        if error is None:
            try:
                self._start_job()
            except PdserveError as refused:
                error = refused
        if error is not None:
            self._stopped = True
            if not isinstance(error, PdserveError):
                error = Internal(f"writing pages failed: {error!r}")
            self._error = self._error or error
            self._on_error(error)

    def _run(self, batch: _Batch) -> None:
        """Runs in a worker thread. A frame is written only after it verified."""
        for header, frame in batch:
            if self._stopped:
                return
            digest = digests.frame_digest(self._secret, frame.header, frame.payload)
            if not digests.same(digest, frame.digest):
                problem = f"frame {header.seq} (plane {header.plane}, layer {header.layer}) did not verify"
                raise data_loss(problem, "FRAME_DIGEST", "frame")
            self._sink.write(header.plane, header.layer, header.heads, header.tokens, frame.payload)
