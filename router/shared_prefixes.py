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
from typing import Protocol

from pdserve.registry.prefix_notes import note_of, read_note
from router.prefixes import PrefixRecord
from router.sharing import Sharing


class Board(Protocol):
    async def exchange(self, note: bytes) -> tuple[bytes, ...]:
        """See RedisBoard."""
        ...


class PrefixShare(Sharing):
    what = "prefixes"

    def __init__(self, record: PrefixRecord, board: Board, share_s: float) -> None:
        super().__init__(share_s)
        self._record = record
        self._board = board
        record.share()

    async def tell_and_learn(self) -> None:
        for note in await self._board.exchange(note_of(self._record.news())):
            for sent in read_note(note):
                self._record.learn(sent)
            await asyncio.sleep(0)  # a note may hold thousands of blocks: requests come first
