"""Heartbeats on a stream: the same answers as one by one, and older peers on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from pdserve.errors import NotFound, Unavailable
from pdserve.registry import report, service
from pdserve.registry.client import RpcRegistry
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DRAINING, READY, Load
from pdserve.registry.service import RegistryService, add_registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc
from tests.registry.records import FIRST_BOOT, SECOND_BOOT, record


class Counting(RegistryService):
    """Counts what comes as a call of its own, and streams that were opened."""

    def __init__(self, registry: MemoryRegistry) -> None:
        super().__init__(registry)
        self.unary = self.streams = 0

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.unary += 1
        return await super().Heartbeat(request, context)

    async def Report(self, requests: AsyncIterator[pb.HeartbeatRequest], context: Any) -> None:
        self.streams += 1
        await super().Report(requests, context)


class Older(Counting):
    """As before there were streams."""

    async def Report(self, requests: AsyncIterator[pb.HeartbeatRequest], context: Any) -> None:
        self.streams += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


@asynccontextmanager
async def serving(servicer: RegistryService, port: int = 0) -> AsyncIterator[Server]:
    server = Server(port=port)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, servicer)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def beat(registry: RpcRegistry, running: int, state: str = READY) -> None:
    await registry.heartbeat("decode-a", FIRST_BOOT, state, Load(running=running))


async def seen(registry: MemoryRegistry, running: int) -> None:
    """Returns when the worker's record says so: heartbeats that ask for no answer are only on their way."""
    async with asyncio.timeout(5):
        while [live.record.load.running for live in await registry.snapshot()] != [running]:
            await asyncio.sleep(0.001)


async def test_all_heartbeats_of_a_worker_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryRegistry()
    servicer = Counting(store)
    async with serving(servicer) as server:
        registry = RpcRegistry(server.address)
        await registry.register(record())
        for running in range(5):
            await beat(registry, running)
            await seen(store, running)
        await beat(registry, 7, DRAINING)
        (live,) = await store.snapshot()
        assert live.record.state == DRAINING, "a new state is answered, so it is there"
        monkeypatch.setattr(report, "ANSWERED_S", 0.0)
        await beat(registry, 8, DRAINING)
        (live,) = await store.snapshot()
        assert live.record.load.running == 8, "and so is one when the last answer is old"
        assert (servicer.streams, servicer.unary) == (1, 0)
        await registry.deregister("decode-a", FIRST_BOOT)
        await registry.close()
        async with asyncio.timeout(5):
            while servicer._reports:
                await asyncio.sleep(0.001)


async def test_a_forgotten_worker_is_told_and_registers_again() -> None:
    store = MemoryRegistry()
    async with serving(Counting(store)) as server:
        registry = RpcRegistry(server.address)
        heartbeat = Heartbeat(registry, record, RegistrySettings(lease_s=5.0, heartbeat_s=0.02))
        await heartbeat.start()
        await beat(registry, 1)
        await store.deregister("decode-a", FIRST_BOOT)
        async with asyncio.timeout(5):
            while not await store.snapshot():
                await asyncio.sleep(0.001)
        assert heartbeat.warning == ""
        await store.deregister("decode-a", FIRST_BOOT)
        with pytest.raises(NotFound):
            await beat(RpcRegistry(server.address), 1)
        await heartbeat.stop()
        await registry.close()


async def test_with_an_older_router_each_is_a_call_until_a_newer_one_is_there() -> None:
    store = MemoryRegistry()
    old, new = Older(store), Counting(store)
    async with serving(old) as server:
        registry = RpcRegistry(server.address, timeout_s=1.0)
        await registry.register(record())
        for running in range(3):
            await beat(registry, running)
            (live,) = await store.snapshot()
            assert live.record.load.running == running
        assert (old.streams, old.unary) == (1, 3)
        port = int(server.address.rpartition(":")[2])
    with pytest.raises(Unavailable):
        await beat(registry, 4)
    async with serving(new, port):
        async with asyncio.timeout(5):
            while not new.streams:
                try:
                    await beat(registry, 5)
                except Unavailable:
                    await asyncio.sleep(0.02)  # gRPC's own pause before it connects again
        await seen(store, 5)
        assert new.unary == 0
        await registry.close()


async def test_more_streams_than_there_may_be_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_WORKERS", 1)
    store = MemoryRegistry()
    servicer = Counting(store)
    async with serving(servicer) as server:
        first, second = RpcRegistry(server.address), RpcRegistry(server.address)
        await first.register(record())
        await beat(first, 1)
        other = record("decode-b", incarnation=SECOND_BOOT)
        await second.register(other)
        await second.heartbeat("decode-b", SECOND_BOOT, READY, Load(running=2))
        assert [live.record.load.running for live in await store.snapshot()] == [1, 2]
        assert servicer.unary == 1
        await first.close()
        await second.close()


async def test_a_stream_without_a_question_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SILENT_S", 0.05)
    servicer = Counting(MemoryRegistry())
    async with serving(servicer) as server, channel(server.address) as connection:
        call = registry_pb2_grpc.RegistryStub(connection).Report(timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert servicer._reports == 0


async def test_two_workers_with_one_id_do_not_replace_each_other_for_ever() -> None:
    """The later one serves; the earlier one says why it does not, and comes back when the other is gone."""
    store = MemoryRegistry()
    server = Server()
    add_registry(server, store)
    address = await server.start()
    warnings: asyncio.Queue[str] = asyncio.Queue()
    settings = RegistrySettings(lease_s=5.0, heartbeat_s=0.02)
    registries = [RpcRegistry(address) for _ in range(2)]
    twins = (record(), replace(record(), incarnation=SECOND_BOOT))
    first = Heartbeat(registries[0], lambda: twins[0], settings, on_warning=warnings.put_nowait)
    second = Heartbeat(registries[1], lambda: twins[1], settings)
    await first.start()
    await second.start()
    async with asyncio.timeout(5):
        assert "another worker has registered as 'decode-a'" in await warnings.get()
        for _ in range(5):
            await second.renew()
            await first.renew()
            assert [live.record.incarnation for live in await store.snapshot()] == [SECOND_BOOT]
        await second.stop()
        assert await warnings.get() == ""
    assert [live.record.incarnation for live in await store.snapshot()] == [FIRST_BOOT]
    await first.stop()
    for registry in registries:
        await registry.close()
    await server.stop()
