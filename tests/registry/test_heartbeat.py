"""The heartbeat against real registries: renewal, re-registration, outages, the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.errors import Unavailable
from pdserve.registry.client import RpcRegistry
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DRAINING, READY, Load, Registry, WorkerRecord
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.service import add_registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.server import Server
from pdserve.rpc.settings import split_address
from tests.redis_server import RedisServer
from tests.registry.records import record

FAST = RegistrySettings(lease_s=1.0, heartbeat_s=0.02, timeout_s=1.0)
NEVER = RegistrySettings(lease_s=100.0, heartbeat_s=50.0, timeout_s=1.0)


class Watched(MemoryRegistry):
    """A memory registry whose beats a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.beats = asyncio.Semaphore(0)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        try:
            await super().heartbeat(worker_id, incarnation, state, load)
        finally:
            self.beats.release()

    async def next_beats(self, count: int) -> None:
        for _ in range(count):
            async with asyncio.timeout(5):
                await self.beats.acquire()


async def only_record(registry: Registry) -> WorkerRecord:
    (live,) = await registry.snapshot()
    return live.record


async def test_beats_carry_the_records_state_and_load() -> None:
    registry = Watched()
    current = [record()]
    heartbeat = Heartbeat(registry, lambda: current[0], FAST)
    await heartbeat.start()
    assert await only_record(registry) == record()
    current[0] = record(state=DRAINING, load=Load(running=77))
    await registry.next_beats(2)
    assert await only_record(registry) == current[0]
    await heartbeat.stop()
    assert await registry.snapshot() == ()


async def test_renew_reports_a_change_at_once() -> None:
    registry = MemoryRegistry()
    current = [record(state=READY)]
    heartbeat = Heartbeat(registry, lambda: current[0], NEVER)
    await heartbeat.start()
    current[0] = record(state=DRAINING)
    await heartbeat.renew()
    assert (await only_record(registry)).state == DRAINING
    await heartbeat.stop()


async def test_a_forgotten_worker_registers_again() -> None:
    registry = Watched()
    heartbeat = Heartbeat(registry, record, FAST)
    await heartbeat.start()
    await registry.deregister("decode-a", record().incarnation)
    await registry.next_beats(2)
    assert await only_record(registry) == record()
    assert heartbeat.warning == ""
    await heartbeat.stop()


async def test_stop_is_idempotent_and_ends_the_task() -> None:
    before = asyncio.all_tasks()
    registry = MemoryRegistry()
    heartbeat = Heartbeat(registry, record, FAST)
    await heartbeat.start()
    await heartbeat.stop()
    await heartbeat.stop()
    await heartbeat.renew()
    assert await registry.snapshot() == ()
    assert asyncio.all_tasks() == before


async def test_stop_before_start_does_nothing() -> None:
    registry = MemoryRegistry()
    await Heartbeat(registry, record, FAST).stop()
    assert await registry.snapshot() == ()


async def test_start_fails_when_the_registry_is_down(unused_tcp_port: int) -> None:
    before = asyncio.all_tasks()
    for registry in (
        RpcRegistry(f"127.0.0.1:{unused_tcp_port}", timeout_s=0.5),
        RedisRegistry(f"redis://127.0.0.1:{unused_tcp_port}/0", timeout_s=0.5),
    ):
        with pytest.raises(Unavailable, match=str(unused_tcp_port)):
            await Heartbeat(registry, record, FAST).start()
        await registry.close()
    assert asyncio.all_tasks() == before


async def outage(registry: Registry, end: Callable[[], Any], begin_again: Callable[[], Any]) -> None:
    """Warned once, goes on, registers again when the registry is back (and empty), deregisters at the end."""
    changes: asyncio.Queue[str] = asyncio.Queue()
    heartbeat = Heartbeat(registry, record, FAST, on_warning=changes.put_nowait)
    await heartbeat.start()
    await end()
    async with asyncio.timeout(10):
        assert await changes.get() == heartbeat.warning != ""
    await heartbeat.renew()
    await heartbeat.renew()
    assert changes.empty()  # one warning per outage, not one per beat
    await begin_again()
    async with asyncio.timeout(10):
        assert await changes.get() == ""
    assert await only_record(registry) == record()
    await heartbeat.stop()
    assert await registry.snapshot() == ()


@pytest.mark.redis
async def test_a_redis_outage_is_survived(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    registry = RedisRegistry(redis_server.url, timeout_s=1.0)
    with caplog.at_level(logging.WARNING, "pdserve.registry.heartbeat"):
        await outage(
            registry, lambda: asyncio.to_thread(redis_server.kill), lambda: asyncio.to_thread(redis_server.start)
        )
    warnings = [r for r in caplog.records if r.name == "pdserve.registry.heartbeat" and r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "serving goes on" in warnings[0].getMessage()
    await registry.close()


async def test_a_router_restart_is_survived() -> None:
    servers: list[Server] = []

    async def serve(port: int = 0) -> str:
        server = Server(port=port)
        add_registry(server, MemoryRegistry())
        servers.append(server)
        return await server.start()

    address = await serve()
    registry = RpcRegistry(address, timeout_s=1.0)
    await outage(registry, lambda: servers[0].stop(), lambda: serve(split_address(address)[1]))
    await registry.close()
    await servers[1].stop()


async def test_a_worker_that_stops_after_its_registry_warns_nobody(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    add_registry(server, MemoryRegistry())
    registry = RpcRegistry(await server.start(), timeout_s=1.0)
    heartbeat = Heartbeat(registry, record, NEVER)
    await heartbeat.start()
    await server.stop()
    with caplog.at_level(logging.INFO, "pdserve.registry.heartbeat"):
        await heartbeat.stop()
    (told,) = (r for r in caplog.records if r.name == "pdserve.registry.heartbeat")
    assert told.levelno == logging.INFO and "could not deregister decode-a" in told.getMessage()
    await registry.close()


@pytest.mark.redis
async def test_stop_is_bounded_when_redis_hangs(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, timeout_s=30.0)
    settings = RegistrySettings(lease_s=1.0, heartbeat_s=0.02, timeout_s=0.3)
    heartbeat = Heartbeat(registry, record, settings)
    await heartbeat.start()
    redis_server.freeze()
    began = time.monotonic()
    await heartbeat.stop()
    assert time.monotonic() - began < 2.0
    redis_server.thaw()
    await registry.close()


async def test_a_broken_record_factory_is_a_warning_not_the_end() -> None:
    registry = Watched()
    broken = [False]

    def factory() -> WorkerRecord:
        if broken[0]:
            raise ZeroDivisionError("load")
        return record()

    changes: asyncio.Queue[str] = asyncio.Queue()
    heartbeat = Heartbeat(registry, factory, FAST, on_warning=changes.put_nowait)
    await heartbeat.start()
    broken[0] = True
    async with asyncio.timeout(5):
        assert "ZeroDivisionError" in await changes.get()
    broken[0] = False
    async with asyncio.timeout(5):
        assert await changes.get() == ""
    await heartbeat.stop()
