"""Background tasks that are never forgotten: each is kept, and one that dies is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Background:
    """Tasks of one event loop.

    Args:
        on_death: told of a task's name and error when it ends by one. Tasks handle the errors they
            expect, so this is a fault of ours.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None]) -> None:
        self._on_death = on_death
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def join(self) -> None:
        """Returns when every task has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_death(task.get_name(), error)
