"""One attempt at its receiver: what it may still do, and how it ends early."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cache_transfer.intake import AnyIntake
from cache_transfer.messages import SharedMemory
from cache_transfer.refusals import stale
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.tracing import Receipt
from cache_transfer.waiting import Deadline
from pdserve.errors import PdserveError


@dataclass
class Attempt:
    """Implements `jobs.Rights`. Event loop only."""

    claim: Claim
    deadline: Deadline
    book: TicketBook
    offer: SharedMemory | None  # of the sender's memory
    receipt: Receipt
    idle_timeout_s: float
    intake: AnyIntake | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def may_write(self) -> None:
        self.deadline.check()
        if not self.book.is_current(self.claim.handoff_id, self.claim.attempt):
            raise stale("this attempt is no longer current")

    def progress(self) -> None:
        self.deadline.extend(self.idle_timeout_s, "a frame")

    def on_error(self, error: PdserveError) -> None:
        self.deadline.interrupt(error)
