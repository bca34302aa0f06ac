"""What only a real Redis can show: outages, freezes, restarts, passwords, foreign data."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio

from pdserve.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from pdserve.registry.client import RpcRegistry
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.open import describe_url, open_registry
from pdserve.registry.records import READY, Load
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings
from tests.redis_server import RedisServer, running_redis
from tests.registry.records import FIRST_BOOT, record

pytestmark = pytest.mark.redis
SECRET = "pässw0rd-s3cret"


async def unavailable(registry: RedisRegistry, within_s: float) -> Unavailable:
    """Every method must fail with Unavailable, each within the time."""
    error = None
    for call in (
        registry.snapshot(),
        registry.register(record()),
        registry.heartbeat("decode-a", FIRST_BOOT, READY, Load()),
        registry.deregister("decode-a", FIRST_BOOT),
    ):
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            await call
        assert time.monotonic() - began < within_s
        error = caught.value
    assert error is not None
    return error


async def test_an_outage_is_unavailable_and_ends_with_a_restart(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, timeout_s=1.0)
    await registry.register(record())
    redis_server.kill()
    error = await unavailable(registry, within_s=1.5)
    assert redis_server.address in str(error)
    assert error.field == "registry.url"
    assert error.remedy
    redis_server.start()
    # The restarted server is empty, and has forgotten the scripts too.
    with pytest.raises(NotFound):
        await registry.heartbeat("decode-a", FIRST_BOOT, READY, Load())
    await registry.register(record())
    assert [live.record for live in await registry.snapshot()] == [record()]
    await registry.close()


async def test_a_server_that_lost_its_memory_unnoticed_is_unavailable_once(redis_server: RedisServer) -> None:
    registry, other = RedisRegistry(redis_server.url), RedisRegistry(redis_server.url)
    await registry.register(record())
    for each in (registry, other):
        assert [live.record for live in await each.snapshot()] == [record()]
    redis_server.kill()
    redis_server.start()
    for each in (registry, other):
        with pytest.raises(Unavailable) as caught:
            await each.snapshot()
        assert caught.value.reason == "REGISTRY_UNAVAILABLE" and "memory" in str(caught.value)
        assert await each.snapshot() == ()
        await each.close()


async def test_each_reader_and_each_snapshot_under_way_hears_of_a_lost_memory(
    shared_redis: RedisServer,
) -> None:
    registry = RedisRegistry(shared_redis.url, key_prefix="lost:", timeout_s=5.0)
    other = registry.reader()
    await registry.register(record())
    for reader in (registry, other):
        assert [live.record.worker_id for live in await reader.snapshot()] == [record().worker_id]
    async with redis.asyncio.Redis.from_url(shared_redis.url) as client:
        await client.delete(*[key async for key in client.scan_iter("lost:*")])
    with pytest.raises(Unavailable, match="memory"):
        await other.snapshot()
    found = await asyncio.gather(registry.snapshot(), registry.snapshot(), return_exceptions=True)
    assert [type(each) for each in found] == [Unavailable, Unavailable]
    for reader in (registry, other):
        assert await reader.snapshot() == ()
    await registry.close()


async def test_a_server_that_hangs_is_unavailable_in_bounded_time(redis_server: RedisServer) -> None:
    registry = RedisRegistry(redis_server.url, timeout_s=0.3)
    await registry.register(record())
    redis_server.freeze()
    error = await unavailable(registry, within_s=1.0)
    assert redis_server.address in str(error)
    redis_server.thaw()
    await registry.snapshot()
    await registry.close()


async def test_user_password_and_database_come_from_the_url() -> None:
    with running_redis("--user", "worker", "on", f">{SECRET}", "~*", "+@all", "--requirepass", "other") as server:
        settings = RegistrySettings(key_prefix="site-b:")
        url = f"redis://worker:p%C3%A4ssw0rd-s3cret@{server.address}/3"
        registry = open_registry(url, settings)
        await registry.register(record())
        raw: Any = redis.asyncio.Redis(port=server.port, username="worker", password=SECRET, db=3)
        assert sorted(await raw.keys("*")) == [b"site-b:worker:decode-a", b"site-b:workers"]
        await raw.aclose()
        await registry.close()


async def test_a_wrong_password_is_named_but_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis("--requirepass", "right") as server:
        registry = RedisRegistry(f"redis://:{SECRET}@{server.address}/0", timeout_s=1.0)
        with caplog.at_level(logging.DEBUG):
            error = await unavailable(registry, within_s=1.5)
        await registry.close()
    assert "password" in error.remedy
    assert SECRET not in f"{error} {error.__cause__!r} {error.__suppress_context__} {caplog.text}"
    assert error.__suppress_context__
    assert server.address in str(error)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("url", ["redis://user:{}@{}/0", "redis://{1}/0?username=user&password={0}"])
@pytest.mark.parametrize("text", ["unknown command '{}', with args beginning with: {}", "cannot {} with {}"])
async def test_a_server_that_repeats_the_password_is_not_repeated(url: str, text: str, long: bool) -> None:
    """As those before Redis 6 do, which know no HELLO, and proxies."""
    secret = "s3cr/et!+%41 pä" * (20 if long else 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2].decode())
                told = text.format(words[0], " ".join(f"`{word}`," for word in words[1:]))
                cut = told[:128] if "beginning" in text else told  # as Redis does
                writer.write(f"-ERR {cut}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        registry = RedisRegistry(url.format(quote(secret, safe=""), address))
        with pytest.raises(Unavailable) as caught:
            await registry.snapshot()
        await registry.close()
    assert "s3cr" not in str(caught.value) and "HELLO" in str(caught.value)


async def test_two_prefixes_share_a_database(shared_redis: RedisServer) -> None:
    left, right = (RedisRegistry(shared_redis.url, key_prefix=prefix) for prefix in ("left:", "right:"))
    await left.register(record("in-left"))
    assert await right.snapshot() == ()
    assert [live.record.worker_id for live in await left.snapshot()] == ["in-left"]
    await left.deregister("in-left", FIRST_BOOT)
    await left.close()
    await right.close()


async def test_ended_workers_leave_nothing_in_redis(shared_redis: RedisServer) -> None:
    raw: Any = redis.asyncio.Redis.from_url(shared_redis.url)
    await raw.flushall()
    registry = RedisRegistry(shared_redis.url)
    await registry.register(record(lease_s=0.05))
    await raw.blpop("nothing", timeout=0.2)  # time passes on the server, whose clock ends the lease
    assert await raw.keys("*") == [b"pdserve:workers"]
    assert await registry.snapshot() == ()
    assert await raw.keys("*") == [b"pdserve:birth"]
    assert 0 < await raw.ttl("pdserve:birth") <= 3600
    await registry.close()
    await raw.aclose()


async def test_unreadable_records_are_left_out_with_a_warning(
    shared_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    raw: Any = redis.asyncio.Redis.from_url(shared_redis.url)
    await raw.flushall()
    registry = RedisRegistry(shared_redis.url)
    await registry.register(record("good"))
    await registry.register(record("broken"))
    await registry.register(record("odd"))
    await raw.hset("pdserve:worker:broken", "record", b"\xff\xff\xff")
    await raw.hset("pdserve:worker:odd", "state", b"sleeping")
    for name in ("stateless", "loadless", "foreign"):
        await registry.register(record(name))
    await raw.hdel("pdserve:worker:stateless", "state")
    await raw.hdel("pdserve:worker:loadless", "load")
    await raw.set("pdserve:worker:foreign", b"not a hash at all")
    with caplog.at_level(logging.WARNING, "pdserve.registry.redis"):
        assert [live.record.worker_id for live in await registry.snapshot()] == ["good"]
    for name in ("broken", "odd", "stateless", "loadless", "foreign"):
        assert f"b'{name}'" in caplog.text
    assert "b'good'" not in caplog.text

    # Said once for each change, not at every snapshot.
    caplog.clear()
    await registry.snapshot()
    assert not caplog.records
    await raw.hset("pdserve:worker:broken", mapping={"record": b"", "version": b"another"})
    await raw.hdel("pdserve:worker:odd", "load")
    await registry.snapshot()
    await registry.snapshot()
    assert sorted(name for line in caplog.messages for name in ("broken", "odd") if name in line) == ["broken", "odd"]
    await registry.register(record("broken"))
    assert len(await registry.snapshot()) == 2
    await raw.hset("pdserve:worker:broken", mapping={"record": b"", "version": b"another"})
    await registry.snapshot()
    assert len(caplog.records) == 3
    await raw.flushall()
    await registry.close()
    await raw.aclose()


async def test_a_record_no_reader_would_take_is_refused(shared_redis: RedisServer) -> None:
    registry = RedisRegistry(shared_redis.url)
    with pytest.raises(InvalidRequest) as caught:
        await registry.register(record(role="both"))
    assert caught.value.field == "role"
    assert await registry.snapshot() == ()
    await registry.close()


async def test_many_callers_at_once(shared_redis: RedisServer) -> None:
    registry = RedisRegistry(shared_redis.url)
    names = [f"w{number:02}" for number in range(20)]
    await asyncio.gather(*(registry.register(record(name)) for name in names))
    assert [live.record.worker_id for live in await registry.snapshot()] == names
    await asyncio.gather(*(registry.deregister(name, FIRST_BOOT) for name in names))
    assert await registry.snapshot() == ()
    await registry.close()


async def test_open_registry_knows_every_scheme() -> None:
    rpc = open_registry("grpc://127.0.0.1:5")
    tls = open_registry("rediss://u:p@example.org:6380/1?ssl_cert_reqs=required")
    assert isinstance(open_registry("memory://"), MemoryRegistry)
    assert isinstance(rpc, RpcRegistry)
    assert isinstance(tls, RedisRegistry)
    assert tls.address == "rediss://example.org:6380/1"
    pool = tls._link._clients[0].connection_pool
    assert pool.connection_class is redis.asyncio.SSLConnection
    await rpc.close()
    await tls.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://x",
        "localhost:6379",
        "redis://",
        f"redis://:{SECRET}@",
        f"redis://u:{SECRET}@h:port/0",
        f"redis://u:{SECRET}@127.0.0.1:1/0?socket_timeout=soon",
        "grpc://",
        "grpc://host",
    ],
)
def test_bad_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_registry(url, rpc=RpcSettings(allow_plaintext=True))
    assert SECRET not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("url", ["redis://10.0.0.1:6379/0", "grpc://10.0.0.1:5"])
async def test_plaintext_beyond_this_machine_needs_leave(url: str) -> None:
    with pytest.raises(ConfigError, match="allow_plaintext"):
        open_registry(url)
    registry = open_registry(url, rpc=RpcSettings(allow_plaintext=True))
    await registry.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory"),
        ("grpc://127.0.0.1:5", "grpc://127.0.0.1:5"),
        (f"redis://u:{SECRET}@h/2", "redis://h:6379/2"),
        ("rediss://[::1]:7/0", "rediss://[::1]:7/0"),
    ],
)
def test_describe_url_hides_secrets(url: str, shown: str) -> None:
    assert describe_url(url) == shown
