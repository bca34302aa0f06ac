"""The operator of a soak: replaces one adapter, unloads and loads another, and gives both to workers that came back."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.soak_questions import REPLACED, TOGGLED, VERSIONS
from pdserve.client import AsyncClient, WorkerAdapters
from pdserve.errors import PdserveError
from pdserve.rpc.background import set_within

UNLOAD_S = 20.0  # that requests get to end


class Changes:
    """Belongs to one event loop.

    Args:
        client: of an operator.
        root: has a directory for each version.
    """

    def __init__(self, client: AsyncClient, root: Path) -> None:
        self.done = 0
        self.refused: list[str] = []
        """What a worker that was there did not do."""
        self._client, self._root = client, root
        self._versions = itertools.cycle(VERSIONS[REPLACED])
        self._now = next(self._versions)
        self._toggled = False  # callers may ask for it
        self._loaded = False
        self._lock = asyncio.Lock()

    def serves(self, name: str) -> bool:
        return name != TOGGLED or self._toggled

    async def restore(self) -> None:
        """To be called when a worker has come back, which serves none."""
        async with self._lock:
            await self._load(REPLACED, self._now)
            if self._loaded:
                await self._load(TOGGLED, VERSIONS[TOGGLED][0])

    async def change_until(self, resting: asyncio.Event, drawn: random.Random, pause_s: float) -> None:
        while not await set_within(resting, drawn.expovariate(1 / pause_s)):
            async with self._lock:
                if drawn.random() < 0.5:
                    self._now = next(self._versions)
                    await self._load(REPLACED, self._now)
                elif self._loaded:
                    self._toggled = False
                    self._loaded = not await self._unload(TOGGLED)
                else:
                    await self._load(TOGGLED, VERSIONS[TOGGLED][0])
                    self._loaded = self._toggled = True
            self.done += 1

    async def _load(self, name: str, version: str) -> None:
        await self._note(f"load {name} {version}", self._client.load_adapter(name, str(self._root / version)))

    async def _unload(self, name: str) -> bool:
        return await self._note(f"unload {name}", self._client.unload_adapter(name, wait_s=UNLOAD_S))

    async def _note(self, what: str, call: Awaitable[tuple[WorkerAdapters, ...]]) -> bool:
        """Whether every worker that can be reached did it."""
        try:
            workers = await call
        except PdserveError as error:
            self.refused.append(f"{what}: {error.reason}: {error}")
            return False
        errors = [(w.worker_id, w.error) for w in workers if w.error is not None]
        self.refused += [f"{what} at {worker}: {error.reason}: {error}" for worker, error in errors]
        return not errors
