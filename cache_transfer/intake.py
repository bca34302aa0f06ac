"""The frames of one attempt at its receiver: checked, counted, and written in threads.

`Intake` takes them from messages, and checks and counts them on the event loop; `queue_intake.py` takes them from a
queue in shared memory.

With shared memory the sender is told which slots are free again. That is a task of its own,
at most one at a time: it answers with the number of frames written so far until no more were.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from cache_transfer.checks import accept_frame, check_commit
from cache_transfer.codec import Coverage
from cache_transfer.contract import WorkerContract
from cache_transfer.digests import Manifest
from cache_transfer.jobs import Rights
from cache_transfer.messages import (
    MAX_FRAMES,
    Commit,
    Frame,
    FrameHeader,
    Frames,
    Grant,
    Logits,
    Queued,
    Release,
    Response,
    SharedFrame,
    SharedFrames,
)
from cache_transfer.pages import PageSink
from cache_transfer.refusals import out_of_order, sender_gone
from cache_transfer.shared import Shared
from cache_transfer.tickets import Claim
from cache_transfer.waiting import settle
from cache_transfer.writers import FrameWriter, Writers

FrameMessage = Frame | Frames | SharedFrames | Queued


@dataclass(frozen=True)
class Incoming:
    """What an intake works with, of one attempt.

    Args:
        shared: memory of the sender that is read; the intake closes it.
        answer: sends to the sender.
    """

    executor: Executor
    sink: PageSink
    claim: Claim
    contract: WorkerContract
    max_payload_bytes: int
    shared: Shared | None
    rights: Rights
    answer: Callable[[Response], Awaitable[None]]


class AnyIntake(ABC):
    """Owned by one receiving task; made when its pages are granted, and ended with `drain`."""

    def __init__(self, incoming: Incoming) -> None:
        claim, limit = incoming.claim, incoming.max_payload_bytes
        self.manifest = Manifest(claim.secret, claim.identity)
        self.grant = Grant(claim.start, claim.end, limit, incoming.shared is not None, MAX_FRAMES)
        self._incoming = incoming
        self._coverage = Coverage(incoming.contract, claim.start, claim.end, limit, claim.kv_dtype)
        self._writer = FrameWriter(incoming.sink, claim.secret, incoming.shared)
        self._written = self._told = 0  # frames
        self._telling: asyncio.Task[None] | None = None
        self._drained = False

    @abstractmethod
    async def take(self, message: FrameMessage) -> None:
        """Accepts frames that may come next, and waits while too many are not yet written.

        Raises PdserveError for the first that is wrong, or was when it was written.
        """

    @abstractmethod
    async def _all_written(self) -> None:
        """Waits until there is nothing more to write. Raises the first error."""

    @abstractmethod
    async def _still(self) -> None:
        """Nothing writes after this. Idempotent; survives cancellation."""

    async def finish(self, logits: Logits, commit: Commit) -> None:
        """Returns when everything was written, and the commit says what came. Raises the first error."""
        await self._all_written()  # a byte that did not verify is the more telling error
        check_commit(commit, self._incoming.claim, self._coverage, self.manifest, logits)
        if self._telling is not None:  # the acknowledgement comes after it
            await settle((self._telling,))

    async def drain(self) -> None:
        """Nothing writes pages or reads shared memory after this. Idempotent; survives cancellation."""
        self._drained = True
        telling = () if self._telling is None else (self._telling,)
        for task in telling:
            task.cancel()
        try:
            await self._still()
        finally:
            if self._incoming.shared is not None:
                self._incoming.shared.close()
            await settle(telling)

    def _accept(self, frame: Frame | SharedFrame) -> FrameHeader:
        """Counts a frame that may come next."""
        header = accept_frame(frame, self._coverage, self._incoming.claim.secret, self._incoming.shared)
        self.manifest.add(frame.digest, frame.size)
        return header

    def _tell(self) -> None:
        """The sender will hear how many frames were written."""
        if self._drained or not (self._telling is None or self._telling.done()):
            return
        self._telling = asyncio.create_task(self._telling_of_all())
        self._telling.add_done_callback(self._on_told)

    async def _telling_of_all(self) -> None:
        while self._told < self._written:
            self._told = self._written
            await self._incoming.answer(Release(self._told))

    def _on_told(self, telling: asyncio.Task[None]) -> None:
        if not telling.cancelled() and telling.exception() is not None:
            self._incoming.rights.on_error(sender_gone())


class Intake(AnyIntake):
    """Of frames that come in messages."""

    def __init__(self, incoming: Incoming) -> None:
        super().__init__(incoming)
        self._writers = Writers(incoming.executor, self._writer, incoming.rights, self._on_written)

    async def take(self, message: FrameMessage) -> None:
        if isinstance(message, Queued) or (isinstance(message, SharedFrames) and self._incoming.shared is None):
            raise out_of_order(message, "frame or logits")
        frames = (message,) if isinstance(message, Frame) else message.frames
        await self._writers.put([(self._accept(frame), frame) for frame in frames])

    async def _all_written(self) -> None:
        await self._writers.finish()

    async def _still(self) -> None:
        await self._writers.drain()

    def _on_written(self, frames: int) -> None:
        self._written += frames
        if self._incoming.shared is not None:
            self._tell()
