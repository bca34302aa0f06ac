"""Work of one attempt in threads: one job at a time, and none after the attempt has lost its right to write.

Fencing: a job starts only after `Rights.may_write` said yes in the same step of the event loop, and
`drain` waits for the job that started. So once an attempt was revoked, no job starts, and
once `drain` returned, none runs: its pages are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from cache_transfer.waiting import settle
from pdserve.errors import Internal, PdserveError

Job = Callable[[], int]


class Rights(Protocol):
    """What an attempt may do; its receiver says. Called on the event loop."""

    def may_write(self) -> None:
        """Raises when the attempt has lost the right to write."""
        ...

    def progress(self) -> None:
        """Something was written: the attempt is not idle."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """Ends the attempt."""
        ...


class Jobs:
    """Owned by one receiving task.

    Args:
        rights: asked on the event loop before each job, and told of the first error of one.
        find: the next job, or None while there is nothing to do. Called on the event loop.
        on_written: told, on the event loop, how many frames a job has written: what it returned.
    """

    def __init__(
        self, executor: Executor, rights: Rights, find: Callable[[], Job | None], on_written: Callable[[int], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._rights = rights
        self._find = find
        self._on_written = on_written
        self._job: asyncio.Future[int] | None = None
        self._error: PdserveError | None = None
        self.stopped = False
        """Read by jobs, which then end early."""

    @property
    def running(self) -> bool:
        return self._job is not None

    def check(self) -> None:
        """Raises the first error of a job."""
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Starts the next job, unless one runs, whose end will. Raises what `Rights.may_write` raises."""
        if self.stopped or self._job is not None:
            return
        job = self._find()
        if job is None:
            return
        self._rights.may_write()
        self._job = self._loop.run_in_executor(self._executor, job)
        self._job.add_done_callback(self._on_done)

    async def end_of_job(self) -> None:
        """Waits for the job that runs, if one does. Its callback, which may start the next, runs before."""
        if self._job is not None:
            await asyncio.wait((self._job,))

    async def finish(self) -> None:
        """Returns when there is nothing more to do; raises the first error instead."""
        self.start()
        while self._job is not None:
            await self.end_of_job()
        self.check()

    async def drain(self) -> None:
        """Starts nothing more and waits for what has started. Idempotent; survives cancellation."""
        self.stopped = True
        if self._job is not None:
            await settle((self._job,))

    def _on_done(self, job: asyncio.Future[int]) -> None:
        self._job = None
        error = job.exception()
        if error is None:
            try:
                self._rights.progress()
                self.start()
                self._on_written(job.result())
            except PdserveError as refused:
                error = refused
        if error is not None:
            self.stopped = True
            if not isinstance(error, PdserveError):
                error = Internal(f"writing pages failed: {error!r}")
            self._error = self._error or error
            self._rights.on_error(error)
