"""The registry's gRPC service refuses what it should, and its client tells outages apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdserve.errors import ConfigError, Exhausted, InvalidRequest, Unavailable
from pdserve.registry import memory, wire
from pdserve.registry.client import RpcRegistry
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import PREFILL, READY, LiveRecord, Load
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.service import add_registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc
from tests.registry.records import FIRST_BOOT, record


@asynccontextmanager
async def serving(registry: Any) -> AsyncIterator[str]:
    server = Server()
    add_registry(server, registry)
    try:
        yield await server.start()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("worker_id", lambda r: r.status.ClearField("worker_id")),
        ("worker_id", lambda r: setattr(r.status, "worker_id", "x" * 129)),
        ("worker_id", lambda r: setattr(r.status, "worker_id", "two words")),
        ("worker_id", lambda r: setattr(r.status, "worker_id", "a\nb")),
        ("role", lambda r: setattr(r.status, "role", "both")),
        ("state", lambda r: setattr(r.status, "state", "sleeping")),
        ("model", lambda r: r.status.ClearField("model")),
        ("incarnation", lambda r: setattr(r, "incarnation", b"short")),
        ("lease_ms", lambda r: setattr(r, "lease_ms", 0)),
        ("lease_ms", lambda r: setattr(r, "lease_ms", wire.MAX_LEASE_MS + 1)),
        ("endpoints", lambda r: r.status.ClearField("endpoints")),
        ("endpoints", lambda r: r.status.endpoints.extend(list(r.status.endpoints) * 40)),
        ("transfer", lambda r: setattr(r.status, "role", PREFILL)),
        ("endpoint.address", lambda r: r.transfer[0].ClearField("address")),
        ("contract.attention", lambda r: r.status.contract.ClearField("attention")),
        ("contract_digest", lambda r: setattr(r.status, "contract_digest", b"x" * 32)),
        ("load.tokens_per_s", lambda r: setattr(r.status.load, "tokens_per_s", float("nan"))),
        ("record", lambda r: r.status.contract.info.update({f"k{n}": "v" * 4000 for n in range(100)})),
    ],
)
async def test_malformed_records_are_refused_by_field(field: str, spoil: Callable[[Any], Any]) -> None:
    registry = MemoryRegistry()
    message = wire.record_to_proto(record())
    spoil(message)
    async with serving(registry) as address, channel(address) as connection:
        stub = registry_pb2_grpc.RegistryStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(pb.RegisterRequest(record=message), timeout=5)
    error = from_rpc_error(caught.value)
    assert type(error) is InvalidRequest
    assert error.field == field
    assert error.remedy
    assert await registry.snapshot() == ()


async def test_malformed_heartbeats_are_refused_by_field() -> None:
    async with serving(MemoryRegistry()) as address:
        registry = RpcRegistry(address)
        await registry.register(record())
        for field, call in (
            ("state", registry.heartbeat("decode-a", FIRST_BOOT, "sleeping", Load())),
            ("incarnation", registry.heartbeat("decode-a", b"", READY, Load())),
            ("load.tokens_per_s", registry.heartbeat("decode-a", FIRST_BOOT, READY, Load(tokens_per_s=-1.0))),
            ("incarnation", registry.deregister("decode-a", b"")),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await call
            assert caught.value.field == field
        (live,) = await registry.snapshot()
        assert live.record == record()
        await registry.close()


async def test_a_full_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_WORKERS", 2)
    async with serving(MemoryRegistry()) as address:
        registry = RpcRegistry(address)
        await registry.register(record("a"))
        await registry.register(record("b"))
        with pytest.raises(Exhausted, match="2 workers"):
            await registry.register(record("c"))
        await registry.register(record("a"))
        await registry.close()


async def test_a_service_over_a_dead_redis_passes_the_outage_on(unused_tcp_port: int) -> None:
    dead = RedisRegistry(f"redis://:hidden@127.0.0.1:{unused_tcp_port}/0", timeout_s=0.5)
    async with serving(dead) as address:
        registry = RpcRegistry(address)
        with pytest.raises(Unavailable, match=str(unused_tcp_port)) as caught:
            await registry.snapshot()
        assert "hidden" not in str(caught.value)
        await registry.close()
    await dead.close()


class Silent(MemoryRegistry):
    """Answers nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        await self.go_on.wait()
        return await super().snapshot()


async def test_a_service_that_does_not_answer_is_unavailable() -> None:
    silent = Silent()
    async with serving(silent) as address:
        registry = RpcRegistry(address, timeout_s=0.2)
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await registry.snapshot()
        silent.go_on.set()
        assert await registry.snapshot() == ()
        await registry.close()


async def test_the_client_leaves_out_what_it_cannot_read(caplog: pytest.LogCaptureFixture) -> None:
    inner = MemoryRegistry()
    await inner.register(record("good"))
    await inner.register(record("odd", state="sleeping"))
    async with serving(inner) as address:
        registry = RpcRegistry(address)
        with caplog.at_level(logging.WARNING, "pdserve.registry.client"):
            assert [live.record.worker_id for live in await registry.snapshot()] == ["good"]
        assert "'odd'" in caplog.text
        await registry.close()


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("registry.lease_s", {"lease_s": 0.0}),
        ("registry.timeout_s", {"timeout_s": float("inf")}),
        ("registry.heartbeat_s", {"lease_s": 1.0, "heartbeat_s": 0.6}),
    ],
)
def test_settings_are_checked_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RegistrySettings(**given)
    assert caught.value.field == field
