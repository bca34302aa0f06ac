"""One thread that owns the engine: messages in, results out, no shared state.

Producer: any event loop, through `run`. Consumer: the engine thread. Bound: the callers'
own (a worker has one step in flight). A step cannot be stopped from outside: one that hangs in
a driver keeps the thread, and `close` leaves it behind after its limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

import torch

from pdserve.errors import Refused

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs functions one after the other in one thread.

    `threads` is torch's intra-op thread count, which holds for the whole process.
    """

    def __init__(self, threads: int = 1, name: str = "engine") -> None:
        torch.set_num_threads(threads)
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._futures: set[Future[Any]] = set()  # of functions that have not ended
        self._closed = False
        self._steps = 0
        self._busy_since: float | None = None

    @property
    def steps(self) -> int:
        """Functions finished so far, failed ones included. Health watches it move."""
        return self._steps

    @property
    def busy_s(self) -> float:
        """Seconds that the current function has been running; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def alike(self, function: Callable[P, T]) -> Callable[P, T]:
        """`function` for another thread, computing with as many threads there as here.

        A thread that was not told, or has computed before this one was made, takes one per core for products, and keeps
        them for as long as it lives.
        """

        def told(*args: P.args, **kwargs: P.kwargs) -> T:
            torch.set_num_threads(self._threads)
            return function(*args, **kwargs)

        return told

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Awaits function(*args, **kwargs) run in the engine's thread; its error is raised here.

        A cancelled caller withdraws work that has not begun; work that has begun finishes.
        Raises Refused after `close`.
        """
        if self._closed:
            raise Refused("the engine's thread is closed", reason="CLOSED", remedy="make a new one")
        future = self._pool.submit(self._call, lambda: function(*args, **kwargs))
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return await asyncio.wrap_future(future)

    def close(self, limit_s: float | None = None) -> bool:
        """Drops what has not begun, waits up to `limit_s` (None: for ever) for what has, joins the thread.

        False: a function still runs, and its thread keeps the interpreter from exiting.
        """
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        running = [future for future in tuple(self._futures) if not future.done()]
        if wait(running, limit_s).not_done:
            return False
        self._pool.shutdown(wait=True)
        return True

    def _call(self, work: Callable[[], T]) -> T:
        self._busy_since = time.monotonic()
        try:
            return work()
        finally:
            self._busy_since = None
            self._steps += 1
