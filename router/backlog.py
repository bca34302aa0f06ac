"""The events of one request that its client has not read yet.

Producer: the request's orchestration task. Consumer: the door the client came through.
Bound: `limit` tokens; waiting token batches of one choice merge, so a slow client finds one large
message instead of many small ones, and a full backlog makes the producer wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from pdserve.errors import Cancelled
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, TokenBatch


@dataclass(frozen=True)
class Moved:
    """Workers of another contract serve the request from here on. Before any token, and for the doors alone."""

    contract_digest: bytes


Event = Accepted | Moved | TokenBatch | HandoffRecord | Finish


def merge(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """One batch of two adjacent ones of the same choice."""
    return replace(
        first,
        ids=first.ids + second.ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )


class Backlog:
    """See the module's docstring. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._producer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # something to read, or the producer has ended
        self._space = asyncio.Event()
        self._space.set()

    async def put(self, event: Event) -> None:
        """Appends; waits while the backlog is full."""
        await self._space.wait()
        if not (isinstance(event, TokenBatch) and self._joined(event)):
            self._events.append(event)
        self._settle()

    def _joined(self, batch: TokenBatch) -> bool:
        """Puts it to tokens of its choice that wait, if there are any: between choices the order is free."""
        for at, waits in enumerate(self._events):
            if isinstance(waits, TokenBatch) and waits.choice == batch.choice:
                self._events[at] = merge(waits, batch)
                return True
        return False

    def add(self, record: HandoffRecord) -> None:
        """Appends the record of a request that has failed, without waiting: there is one, and nothing follows it."""
        self._events.append(record)
        self._settle()

    def ended(self, producer: asyncio.Task[None]) -> None:
        """Done callback of the producer: its error, if any, follows the last event."""
        self._producer = producer
        self._changed.set()

    def taken(self) -> tuple[Event, ...]:
        """All that waits, at once: for a reader that comes when the producer is done."""
        events = tuple(self._events)
        self._events.clear()
        self._settle()
        return events

    async def get(self) -> Event | None:
        """The next event; None after the last one. Raises what ended the producer."""
        await self._changed.wait()
        if self._events:
            event = self._events.popleft()
            self._settle()
            return event
        if self._producer is None or self._producer.cancelled():
            raise Cancelled("the request was cancelled")
        error = self._producer.exception()
        if error is not None:
            raise error
        return None

    def _settle(self) -> None:
        waiting = sum(len(event.ids) for event in self._events if isinstance(event, TokenBatch))
        if waiting < self._limit:
            self._space.set()
        else:
            self._space.clear()
        if self._events or self._producer is not None:
            self._changed.set()
        else:
            self._changed.clear()
