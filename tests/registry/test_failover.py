"""A Redis that moves to another server, or is full: what routers and workers see of it, with real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from pdserve.errors import ConfigError, Refused, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.open import describe_url, open_registry
from pdserve.registry.records import READY, Load, Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.redis_url import parse
from pdserve.rpc.settings import RpcSettings
from tests.redis_server import RedisServer, running_redis, running_sentinel
from tests.registry.records import FIRST_BOOT, SECOND_BOOT, record

pytestmark = pytest.mark.redis


@pytest.fixture
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary, and a replica that has its data."""
    with running_redis() as primary, running_redis() as replica:
        replica.follow(primary)
        yield primary, replica


async def ids(registry: Registry) -> list[str]:
    return [live.record.worker_id for live in await registry.snapshot()]


async def until_served(registry: Registry, within_s: float = 20.0) -> list[str]:
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await ids(registry)
            except Unavailable:
                await asyncio.sleep(0.05)  # other processes decide who is the primary


async def test_a_promoted_replica_in_the_list_is_found_and_the_change_is_told_once(
    servers: tuple[RedisServer, RedisServer],
) -> None:
    primary, replica = servers
    # The replica first: that one refuses writes is no reason to stop looking.
    registry = RedisRegistry(f"redis://{replica.address},{primary.address}/0", timeout_s=1.0)
    await registry.register(record(lease_s=60.0))
    assert await ids(registry) == ["decode-a"]
    primary.kill()
    with pytest.raises(Unavailable) as caught:
        await registry.snapshot()
    assert "READONLY" in str(caught.value), "nobody takes writes now"
    replica.follow(None)
    with pytest.raises(Unavailable, match="taken over"):
        await registry.snapshot()
    assert await ids(registry) == ["decode-a"], "the replica had the record"
    await registry.heartbeat("decode-a", FIRST_BOOT, READY, Load(running=3))
    (live,) = await registry.snapshot()
    assert live.record.load.running == 3
    await registry.close()


async def test_a_primary_that_was_demoted_without_a_word_is_left(servers: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = servers
    registry = RedisRegistry(f"redis://{primary.address},{replica.address}/0", timeout_s=1.0)
    await registry.register(record(lease_s=60.0))
    assert await ids(registry) == ["decode-a"]
    replica.follow(None)
    primary.follow(replica)
    await registry.heartbeat("decode-a", FIRST_BOOT, READY, Load(running=3))
    with redis.Redis(port=replica.port) as client:
        assert client.exists("pdserve:worker:decode-a")
    with pytest.raises(Unavailable, match="taken over"):
        await registry.snapshot()
    assert await ids(registry) == ["decode-a"]
    await registry.close()


async def test_sentinel_is_asked_who_the_primary_is(servers: tuple[RedisServer, RedisServer]) -> None:
    primary, _ = servers
    with running_sentinel(primary, "pools") as port:
        registry = RedisRegistry(f"redis+sentinel://127.0.0.1:{port}/pools/0", timeout_s=1.0)
        await registry.register(record(lease_s=60.0))
        assert await ids(registry) == ["decode-a"]
        primary.kill()
        with pytest.raises(Unavailable):
            await registry.snapshot()
        assert await until_served(registry) == ["decode-a"]
        await registry.close()


async def test_a_full_redis_keeps_its_workers_and_tells_routers(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, timeout_s=1.0)
    await registry.register(record(lease_s=0.4))
    await registry.snapshot()
    with redis.Redis(port=redis_server.port) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        for _ in range(8):
            await registry.heartbeat("decode-a", FIRST_BOOT, READY, Load(running=3))
            with pytest.raises(Unavailable) as caught:
                await registry.snapshot()
            client.blpop("nothing", timeout=0.1)  # time passes on the server: twice the lease in all
        assert "OOM" in str(caught.value) and "maxmemory" in caught.value.remedy
        client.config_set("maxmemory", 0)
    (live,) = await registry.snapshot()
    assert live.record.load.running == 3
    await registry.close()


@pytest.mark.parametrize("lacking", ["HELLO", "XADD"])
async def test_a_redis_that_lacks_a_command_says_which_version_to_use(lacking: str) -> None:
    with running_redis("--rename-command", lacking, "") as server:
        registry = RedisRegistry(server.url)
        with pytest.raises(Unavailable) as caught:
            await registry.board().exchange(b"a note")
        assert caught.value.field == "registry.url" and "6.2" in caught.value.remedy
        await registry.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_of_two_workers_with_one_id_the_later_one_stays(kind: str, redis_server: RedisServer) -> None:
    registry: Registry = MemoryRegistry() if kind == "memory" else RedisRegistry(redis_server.url)
    first, second = record(), record(incarnation=SECOND_BOOT)
    await registry.register(first)
    await registry.register(second)
    with pytest.raises(Refused) as caught:
        await registry.register(first, again=True)
    assert (caught.value.reason, caught.value.field) == ("WORKER_ID_TAKEN", "worker_id")
    assert [live.record.incarnation for live in await registry.snapshot()] == [SECOND_BOOT]
    await registry.deregister("decode-a", SECOND_BOOT)
    await registry.register(first, again=True)
    assert [live.record.incarnation for live in await registry.snapshot()] == [FIRST_BOOT]
    await registry.close()


def test_urls_of_several_servers_are_read_and_shown_without_secrets() -> None:
    place = parse("redis+sentinel://me:word@a:1,[::1]/pools/3")
    assert (place.hosts, place.service, place.database) == ((("a", 1), ("::1", 26379)), "pools", "3")
    assert describe_url("redis+sentinel://me:word@a:1,[::1]/pools/3") == "redis+sentinel://a:1,[::1]:26379/pools/3"
    assert describe_url("rediss://:word@a,b:2/1") == "rediss://a:6379,b:2/1"
    assert "word" not in repr(place)
    with pytest.raises(ConfigError, match="allow_plaintext"):
        open_registry("redis://127.0.0.1:1,example.org:2/0", rpc=RpcSettings())
    for url in ("redis+sentinel://a:1", "redis://a:1,/0", "redis://a:1,b:x/0", "redis://a/b"):
        with pytest.raises(ConfigError) as caught:
            open_registry(url)
        assert caught.value.field == "registry.url"
