"""The events of several requests as one series, for an answer that has them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdserve.errors import Internal, PdserveError
from router.backlog import Event

log = logging.getLogger(__name__)

Numbered = tuple[int, Event]


async def merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Numbered, None]:
    """The events of all streams as they come, each with the number of its stream. Raises the first error of one.

    Closing it closes them all. Queue: producers: a task for each stream; consumer: this generator; bound: one event
    for each stream.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | PdserveError | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    open_streams = len(streams)
    try:
        while open_streams:
            number, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, PdserveError):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int, stream: AsyncGenerator[Event, None], queue: asyncio.Queue[tuple[int, Event | PdserveError | None]]
) -> None:
    """Puts the stream's events, then None or its error."""
    try:
        async with aclosing(stream):
            async for event in stream:
                await queue.put((number, event))
        await queue.put((number, None))
    except PdserveError as error:
        await queue.put((number, error))
    except Exception:
        log.exception("a stream of tokens broke")
        await queue.put((number, Internal("the server failed", remedy="see the server's log")))
