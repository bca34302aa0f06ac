"""What routers on one Redis tell each other of what tenants have used, in the background.

    requests --Quotas.running--> counts --every `share_s`, one round trip--> pdserve/registry/redis_latest.py
    what others say --Quotas.learn--> this router's limits

Together n routers admit at most the limit, and (n - 1) times what of the limit comes to each between two exchanges:
as many limits as there are routers, when all of it comes to all of them in that time. What they admitted too much is
owed, and waited out. Without the Redis each router goes by what it sees itself: n limits.

However many tenants there are, all that use something are told of: a router with more than one note holds says several,
and each of them is to the others what a router's is, as a tenant is always in the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from pdserve.errors import InvalidRequest
from pdserve.registry.quota_notes import note_of, parts_of, read_note
from pdserve.registry.redis_latest import LatestNote
from router.quotas import Quotas
from router.sharing import Sharing

log = logging.getLogger(__name__)


class Latest(Protocol):
    dropped: int

    async def exchange(self, notes: Sequence[bytes]) -> tuple[LatestNote, ...]:
        """See RedisLatest."""
        ...


class QuotaShare(Sharing):
    what = "limits"

    def __init__(self, quotas: Quotas, latest: Latest, share_s: float) -> None:
        super().__init__(share_s)
        self._quotas = quotas
        self._latest = latest
        self._parts = parts_of(quotas.counted)
        self._unread = 0  # notes that could not be used, as often as they were read
        self._odd = False  # whether the last exchange met something that no router wrote

    @property
    def ignored(self) -> int:
        """Entries that no router wrote, since the start."""
        return self._unread + self._latest.dropped

    async def stop(self) -> None:
        """Idempotent. Tells a last time, so that nobody counts what this router no longer runs."""
        running = self._task is not None
        await super().stop()
        if running:
            await self.exchange()

    async def tell_and_learn(self) -> None:
        before, problem = self.ignored, "an entry is none of a router's"
        told = self._quotas.told()
        notes = [note_of({name: told[name] for name in part if name in told}) for part in self._parts]
        for note in await self._latest.exchange(notes):
            try:
                said = read_note(note.text)
            except InvalidRequest as error:
                self._unread, problem = self._unread + 1, str(error)
                continue
            self._quotas.learn(note.by, said, note.age_s)
            await asyncio.sleep(0)  # a note may hold a thousand tenants: requests come first
        odd = self.ignored > before
        if odd and not self._odd:
            log.warning("where routers tell each other of limits somebody else writes, left out: %s", problem)
        self._odd = odd
