"""The frames of one attempt at its receiver: checked and counted on the event loop, written in threads.

With shared memory it also tells the sender which slots are free again. That is a task of its own,
at most one at a time: it answers with the number of frames written so far until no more were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from cache_transfer.checks import accept_frame, check_commit
from cache_transfer.codec import Coverage
from cache_transfer.contract import WorkerContract
from cache_transfer.digests import Manifest
from cache_transfer.messages import (
    MAX_FRAMES,
    Commit,
    Frame,
    Frames,
    Grant,
    Logits,
    Release,
    Response,
    SharedFrames,
    SharedMemory,
)
from cache_transfer.pages import PageSink
from cache_transfer.refusals import out_of_order, sender_gone
from cache_transfer.shared import open_offered
from cache_transfer.tickets import Claim
from cache_transfer.waiting import settle
from cache_transfer.writers import Batch, Rights, Writers


class Intake:
    """Owned by one receiving task; made when its pages are granted, and ended with `drain`.

    Args:
        offer: memory of the sender that may be read, if it can.
        answer: sends to the sender.
    """

    def __init__(
        self,
        executor: Executor,
        sink: PageSink,
        claim: Claim,
        contract: WorkerContract,
        max_payload_bytes: int,
        offer: SharedMemory | None,
        rights: Rights,
        answer: Callable[[Response], Awaitable[None]],
    ) -> None:
        self.manifest = Manifest(claim.secret, claim.identity)
        self._claim = claim
        self._coverage = Coverage(contract, claim.start, claim.end, max_payload_bytes, claim.kv_dtype)
        self._shared = open_offered(offer, claim.secret)
        self._writers = Writers(executor, sink, claim.secret, rights, self._on_written, self._shared)
        self._rights = rights
        self._answer = answer
        self._written = self._told = 0  # frames
        self._telling: asyncio.Task[None] | None = None
        self._drained = False
        self.grant = Grant(claim.start, claim.end, max_payload_bytes, self._shared is not None, MAX_FRAMES)

    async def take(self, message: Frame | Frames | SharedFrames) -> None:
        """Accepts frames that may come next, and waits while too many are not yet written.

        Raises PdserveError for the first that is wrong, or was when it was written.
        """
        frames = (message,) if isinstance(message, Frame) else message.frames
        if isinstance(message, SharedFrames) and self._shared is None:
            raise out_of_order(message, "frame or logits")
        batch: Batch = []
        for frame in frames:
            batch.append((accept_frame(frame, self._coverage, self._claim.secret, self._shared), frame))
            self.manifest.add(frame.digest, frame.size)
        await self._writers.put(batch)

    async def finish(self, logits: Logits, commit: Commit) -> None:
        """Returns when everything was written, and the commit says what came. Raises the first error."""
        await self._writers.finish()  # a byte that did not verify is the more telling error
        check_commit(commit, self._claim, self._coverage, self.manifest, logits)
        if self._telling is not None:  # the acknowledgement comes after it
            await settle((self._telling,))

    async def drain(self) -> None:
        """Nothing writes pages or reads shared memory after this. Idempotent; survives cancellation."""
        self._drained = True
        telling = () if self._telling is None else (self._telling,)
        for task in telling:
            task.cancel()
        try:
            await self._writers.drain()
        finally:
            if self._shared is not None:
                self._shared.close()
            await settle(telling)

    def _on_written(self, frames: int) -> None:
        self._written += frames
        if self._drained or self._shared is None:
            return
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())
            self._telling.add_done_callback(self._on_told)

    async def _tell(self) -> None:
        while self._told < self._written:
            self._told = self._written
            await self._answer(Release(self._told))

    def _on_told(self, telling: asyncio.Task[None]) -> None:
        if not telling.cancelled() and telling.exception() is not None:
            self._rights.on_error(sender_gone())
