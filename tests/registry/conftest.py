"""The four registries behind one fixture, each with a way to let time pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from pdserve.registry.client import RpcRegistry
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.service import add_registry
from pdserve.rpc.server import Server
from tests.clock import Clock
from tests.redis_server import RedisServer, running_redis


@dataclass
class Harness:
    registry: Registry
    pass_time: Callable[[float], Awaitable[None]]  # seconds


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """One that a test may kill."""
    with running_redis() as server:
        yield server


@pytest.fixture(
    params=[
        "memory",
        "rpc-memory",
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rpc-redis", marks=pytest.mark.redis),
    ]
)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        made = await _redis_harness(request, stack) if "redis" in request.param else _memory_harness()
        stack.push_async_callback(made.registry.close)
        if request.param.startswith("rpc"):
            server = Server()
            add_registry(server, made.registry)
            address = await server.start()
            stack.push_async_callback(server.stop)
            made.registry = RpcRegistry(address)
            stack.push_async_callback(made.registry.close)
        yield made


def _memory_harness() -> Harness:
    clock = Clock()

    async def pass_time(seconds: float) -> None:
        clock.now += seconds

    return Harness(MemoryRegistry(clock), pass_time)


async def _redis_harness(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Harness:
    server: RedisServer = request.getfixturevalue("shared_redis")
    raw: Any = redis.asyncio.Redis.from_url(server.url)
    stack.push_async_callback(raw.aclose)
    await raw.flushall()

    async def pass_time(seconds: float) -> None:
        # Leases run on the server's own clock, so time really has to pass there: the server
        # lets a blocking read of a key that nobody writes time out.
        await raw.blpop("nothing", timeout=seconds)

    return Harness(RedisRegistry(server.url), pass_time)
