"""What routers on one Redis tell each other in the background, every `share_s`: the task that does it.

No request waits for it, and nothing depends on it: without the Redis each router goes by what it sees itself.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from pdserve.errors import PdserveError

log = logging.getLogger(__name__)


class Sharing(ABC):
    """One task on the router's event loop, from `start` to `stop`."""

    what = ""  # is told, as the log calls it

    def __init__(self, share_s: float) -> None:
        self._share_s = share_s
        self._task: asyncio.Task[None] | None = None
        self.warning = ""  # why the last exchange failed

    @abstractmethod
    async def tell_and_learn(self) -> None:
        """Once. Raises PdserveError."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"share-{self.what}")

    async def stop(self) -> None:
        """Idempotent. What was not told yet is lost."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def exchange(self) -> None:
        """Tells and learns once. Trouble with the Redis is a warning."""
        try:
            await self.tell_and_learn()
        except PdserveError as error:
            if not self.warning:
                log.warning("%s are not shared with other routers, this one goes on by itself: %s", self.what, error)
            self.warning = str(error)
            return
        if self.warning:
            log.warning("%s are shared again", self.what)
            self.warning = ""

    async def _run(self) -> None:
        while True:
            try:
                await self.exchange()
            except Exception:
                # A fault of ours. Serving is worse without this, and a router that ended for it worse still.
                log.exception("an exchange of %s failed", self.what)
            await asyncio.sleep(self._share_s)
