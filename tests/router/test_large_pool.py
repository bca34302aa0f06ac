"""A large pool: what is read of it in the background leaves requests their turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager

import pytest

from pdserve.registry.records import DECODE, PREFILL, READY, Load, Registry
from pdserve.registry.redis import RedisRegistry
from router.gate import Gate
from router.pool import Pool
from tests.redis_server import running_redis
from tests.router.support import MODEL, record

WORKERS = 512
LIMIT = 2_000  # calls between two turns; at once it would be 30,000
NEW_LIMIT = 8_000  # of workers that were not known; at once it would be 50,000


class Stretches:
    """Counts the calls that Python makes between two turns of a task that wants each of them."""

    def __init__(self) -> None:
        self.longest = self._now = 0

    async def of(self, work: Awaitable[object]) -> object:
        asked = asyncio.create_task(self._take_turns())
        try:
            with self._counting():
                return await work
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _take_turns(self) -> None:
        while True:
            self.longest, self._now = max(self.longest, self._now), 0
            await asyncio.sleep(0)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        def count(frame: object, event: str, arg: object) -> None:
            self._now += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.longest = max(self.longest, self._now)


@pytest.fixture
async def redis_registry() -> AsyncIterator[RedisRegistry]:
    with running_redis() as server:
        registry = RedisRegistry(server.url, timeout_s=30.0)
        yield registry
        await registry.close()


async def fill(registry: Registry) -> None:
    for number in range(WORKERS):
        await registry.register(record(f"w{number:03}", (PREFILL, DECODE)[number % 2], lease_s=60.0))


async def beat(registry: Registry, steps: int) -> None:
    """Every worker has a new load, as in serving."""
    for number in range(WORKERS):
        worker = record(f"w{number:03}", DECODE)
        await registry.heartbeat(worker.worker_id, worker.incarnation, READY, Load(steps=steps))


@pytest.mark.redis
async def test_while_a_large_snapshot_is_read_requests_have_their_turns(redis_registry: RedisRegistry) -> None:
    await fill(redis_registry)
    pool = Pool(redis_registry, Gate(), refresh_s=60.0)
    first, later = Stretches(), Stretches()
    await first.of(pool.refresh())
    assert [m.id for m in pool.members()] == [f"w{number:03}" for number in range(WORKERS)]
    await beat(redis_registry, steps=7)
    await later.of(pool.refresh())
    assert [m.record.load.steps for m in pool.members()] == [7] * WORKERS
    assert len(pool.ready(MODEL)) == WORKERS
    assert first.longest < NEW_LIMIT and later.longest < LIMIT, (first.longest, later.longest)
