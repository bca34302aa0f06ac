"""What routers on one Redis tell each other of where prompts went, in the background.

    requests --PrefixRecord.record--> news --every `share_s`, one round trip--> board (pdserve/registry/redis_board.py)
    board --notes of others--> PrefixRecord.learn --> placement

No request waits for it, and nothing depends on it: without the board each router knows what it sent itself. A note
names blocks by digests that depend on contract, adapter and tenant, and workers by their boot: what a worker held
before it was started again is never looked up. Bounds: those of PrefixRecord and of the board; what does not fit
into a note is left out, oldest first.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.registry.prefix_notes import note_of, read_note
from router.prefixes import PrefixRecord

log = logging.getLogger(__name__)


class Board(Protocol):
    async def exchange(self, note: bytes) -> tuple[bytes, ...]:
        """See RedisBoard."""
        ...


class PrefixShare:
    """One task on the router's event loop, from `start` to `stop`."""

    def __init__(self, record: PrefixRecord, board: Board, share_s: float) -> None:
        self._record = record
        self._board = board
        self._share_s = share_s
        self._task: asyncio.Task[None] | None = None
        self.warning = ""  # why the last exchange failed

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix-share")

    async def stop(self) -> None:
        """Idempotent. What was not told yet is lost."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def exchange(self) -> None:
        """Tells and learns once. Trouble with the board is a warning."""
        try:
            notes = await self._board.exchange(note_of(self._record.news()))
        except PdserveError as error:
            if not self.warning:
                log.warning("other routers cannot be told of prefixes, placement goes on without: %s", error)
            self.warning = str(error)
            return
        if self.warning:
            log.warning("prefixes are shared again")
            self.warning = ""
        for note in notes:
            for sent in read_note(note):
                self._record.learn(sent)
            await asyncio.sleep(0)  # a note may hold thousands of blocks: requests come first

    async def _run(self) -> None:
        while True:
            try:
                await self.exchange()
            except Exception:
                # A fault of ours. Placement is worse without this, and a router that ended for it worse still.
                log.exception("an exchange of prefixes failed")
            await asyncio.sleep(self._share_s)
