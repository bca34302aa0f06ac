"""The router's view of the pools while the registry is away, forgetful or broken."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.errors import Unavailable
from pdserve.registry.client import RpcRegistry
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, PREFILL
from pdserve.registry.service import add_registry
from pdserve.rpc.server import Server
from router.gate import Gate
from router.pool import Pool
from tests.clock import Clock
from tests.router.support import MODEL, ready, record


async def test_an_outage_keeps_the_last_pool_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryRegistry()
    server = Server()
    add_registry(server, store)
    remote = RpcRegistry(await server.start(), timeout_s=1.0)
    pool = Pool(remote, Gate(), refresh_s=60.0)
    try:
        await store.register(record("p", PREFILL, lease_s=30.0))
        await pool.start()
        await server.stop()
        with caplog.at_level(logging.WARNING, "router.pool"):
            await pool.refresh()
            await pool.refresh()
        assert ready(pool) == ["p"]
        assert "registry unreachable" in pool.warning
        assert len(caplog.records) == 1
    finally:
        await pool.stop()
        await remote.close()


class Flaky(MemoryRegistry):
    """A memory registry whose process is away for a while and comes back empty."""

    away = False

    async def snapshot(self):  # type: ignore[no-untyped-def]
        if self.away:
            raise Unavailable("away")
        return await super().snapshot()


async def test_a_suspect_is_given_work_again_when_nobody_can_be_heard_of(clock: Clock) -> None:
    registry = Flaky(clock)
    pool = Pool(registry, Gate(), refresh_s=60.0, clock=clock)
    for worker_id, role in (("p", PREFILL), ("d", DECODE)):
        await registry.register(record(worker_id, role, lease_s=5.0))
    await pool.refresh()
    registry.away = True
    await pool.refresh()
    pool.suspect(pool.members()[1])
    assert pool.verdict(MODEL).matches == ()
    clock.now += 5.1
    assert len(pool.verdict(MODEL).matches) == 1


async def test_a_registry_that_forgot_everything_gets_a_lease_to_learn(clock: Clock) -> None:
    registry = Flaky(clock)
    pool = Pool(registry, Gate(), refresh_s=60.0, clock=clock)
    await registry.register(record("p", PREFILL, lease_s=5.0))
    await pool.refresh()
    registry.away = True
    clock.now += 60
    await pool.refresh()
    pool.suspect(pool.members()[0])
    assert ready(pool) == []
    clock.now += 6  # nobody can be heard of: a suspect gets another chance after a lease
    assert ready(pool) == ["p"]
    registry.away = False
    await pool.refresh()
    assert pool.warning == ""
    assert [m.id for m in pool.members()] == ["p"]
    clock.now += 5.1
    await pool.refresh()
    assert pool.members() == ()


@pytest.mark.parametrize(("pause_s", "left"), [(5.2, []), (5.3, ["p"])])
async def test_workers_get_a_lease_to_be_heard_of_after_all_stood_still(
    clock: Clock, pause_s: float, left: list[str]
) -> None:
    """As when a process that serves its own registry is stopped for longer than a lease, and goes on."""
    registry = MemoryRegistry(clock)
    pool = Pool(registry, Gate(), refresh_s=0.25, clock=clock)
    await registry.register(record("p", PREFILL, lease_s=5.0))
    await pool.refresh()
    clock.now += pause_s
    await pool.refresh()
    assert ready(pool) == left
    for _ in range(25):
        clock.now += 0.2
        await pool.refresh()
    assert ready(pool) == []


async def test_without_a_registry_a_pool_does_not_start() -> None:
    remote = RpcRegistry("127.0.0.1:1", timeout_s=0.5)
    pool = Pool(remote, Gate(), refresh_s=0.1)
    with pytest.raises(Unavailable):
        await pool.start()
    await pool.stop()
    await remote.close()


class Broken(MemoryRegistry):
    """Its snapshots fail in a way that nobody foresaw, as long as `broken` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.snapshots = asyncio.Semaphore(0)

    async def snapshot(self):  # type: ignore[no-untyped-def]
        self.snapshots.release()
        if self.broken:
            raise AttributeError("no attribute 'decode'")
        return await super().snapshot()

    async def more_snapshots(self) -> None:
        """Returns when two more have begun, so that one more was dealt with."""
        async with asyncio.timeout(5):
            while not self.snapshots.locked():
                await self.snapshots.acquire()
            for _ in range(2):
                await self.snapshots.acquire()


async def test_an_unforeseen_error_is_a_warning_with_its_traceback_and_not_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Broken()
    pool = Pool(registry, Gate(), refresh_s=0.001)
    await registry.register(record("p", PREFILL, lease_s=30.0))
    await pool.start()
    try:
        registry.broken = True
        with caplog.at_level(logging.WARNING, "router.pool"):
            await registry.more_snapshots()
            assert "no attribute 'decode'" in pool.warning
            assert ready(pool) == ["p"]
            await registry.more_snapshots()
        (entry,) = caplog.records  # once, however often it happens
        assert entry.exc_info is not None and entry.exc_info[0] is AttributeError
        registry.broken = False
        await registry.register(record("q", PREFILL, lease_s=30.0))
        await registry.more_snapshots()
        assert (ready(pool), pool.warning) == (["p", "q"], "")
    finally:
        await pool.stop()
