"""What one request tells its reader, bounded; of each of its outputs in order.

Queue `events`: producer: the worker (tickets, tokens, the ends); consumer: one Generate
handler; bound: `limit` unread tokens, one ticket and the ends. Tokens of an output that wait are
merged into one message, and a new ticket takes the place of an unread one, which it has made stale.
A full stream pauses its sequences instead of losing anything: the scheduler does not plan them
until the reader has caught up, and the reaper ends them when it never does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from cache_transfer.contract import Ticket
from pdserve.errors import Internal, PdserveError
from pdserve.rpc.events import Finish, Prefilled, TokenBatch

Event = Ticket | Prefilled | TokenBatch | Finish


class EventStream:
    """Event loop only. Ends with a Finish of each output, or with an error, once; later puts are ignored."""

    def __init__(
        self,
        limit: int,
        on_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        outputs: int = 1,
    ) -> None:
        self.full_since: float | None = None  # clock seconds; None: there is room
        self._limit = limit
        self._on_room = on_room
        self._clock = clock
        self._events: deque[Event] = deque()
        self._unread = 0
        self._error: PdserveError | None = None
        self._outputs = outputs  # that have not ended
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def unread(self) -> int:
        """Tokens that wait for the reader."""
        return self._unread

    @property
    def over(self) -> bool:
        """Everything was read, and all outputs have ended as they should."""
        return not self._events and not self._outputs

    def put(self, event: Event) -> None:
        if self._closed:
            return
        if isinstance(event, TokenBatch):
            self._unread += len(event.ids)
            if self._unread >= self._limit and self.full_since is None:
                self.full_since = self._clock()
        elif isinstance(event, Ticket):
            self._events = deque(waits for waits in self._events if not isinstance(waits, Ticket))
        self._events.append(event)
        self._outputs -= isinstance(event, Finish)
        self._closed = not self._outputs
        self._changed.set()

    def fail(self, error: PdserveError) -> None:
        """Ends the stream: the reader still gets what waits, then the error."""
        if not self._closed:
            self._error, self._closed = error, True
            self._changed.set()

    async def next(self) -> Event:
        """The next event; tokens of one output that wait come as one batch. Raises the error that ended the stream."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise Internal("read past the end of a stream", reason="STREAM_ENDED")
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        if not isinstance(event, TokenBatch):
            return event
        batches, others = [event], deque[Event]()
        for waits in self._events:
            if isinstance(waits, TokenBatch) and waits.choice == event.choice:
                batches.append(waits)
            else:
                others.append(waits)
        self._events = others
        batch = merged(batches)
        self._unread -= len(batch.ids)
        if self.full_since is not None and self._unread < self._limit:
            self.full_since = None
            self._on_room()
        return batch


def merged(batches: list[TokenBatch]) -> TokenBatch:
    """Consecutive batches of one choice as one."""
    return TokenBatch(
        first_index=batches[0].first_index,
        ids=tuple(token for batch in batches for token in batch.ids),
        text=b"".join(batch.text for batch in batches),
        logprobs=tuple(entry for batch in batches for entry in batch.logprobs),
        choice=batches[0].choice,
    )
