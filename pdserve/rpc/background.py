"""Tasks that run beside the requests: kept, awaited at the end, and never allowed to die in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for `event`, `seconds` at most; whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def in_turns(items: Iterable[Item], each: int = 64) -> AsyncIterator[Item]:
    """The items, with a turn for the loop's other tasks after every `each`.

    For long work that waits for nothing: without a turn in between, every request would wait until its end. What the
    work reads and others write may change at each turn.
    """
    for count, item in enumerate(items, start=1):
        yield item
        if not count % each:
            await asyncio.sleep(0)  # waits for nothing: gives way once


class Background:
    """The tasks of one service, on its event loop.

    Args:
        on_death: called with a task's name and error when it ended by one; tasks handle what they expect.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None]) -> None:
        self._on_death = on_death
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self, limit_s: float) -> tuple[str, ...]:
        """Cancels every task and waits for their ends; the names of those that still run after `limit_s`."""
        for task in tuple(self._tasks):
            task.cancel()
        try:
            async with asyncio.timeout(limit_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            pass
        return tuple(sorted(task.get_name() for task in self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_death(task.get_name(), error)
