"""Two real routers on one real Redis hold a tenant's limits together, and neither waits for the other or for it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
import redis

from pdserve.client import AsyncClient, Tokens
from pdserve.errors import Exhausted, InvalidRequest
from pdserve.registry.quota_notes import Usage, note_of, parts_of, read_note
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.registry.redis_latest import KEEP_S, MAX_NAMES, MAX_NOTES
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from router.app import Router
from router.quotas import Quotas
from router.shared_quotas import QuotaShare
from router.tenants import Tenant
from tests.redis_server import RedisServer, running_redis
from tests.router.support import House, router_settings
from tests.router.test_quotas import a_request, refused

pytestmark = pytest.mark.redis
ACME, ZETA, FEW = (f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta", "few"))
LIMIT = 4
TENANTS = (
    replace(Tenant.of("acme", ACME), requests_per_minute=LIMIT),
    replace(Tenant.of("zeta", ZETA), requests_per_minute=LIMIT),
    replace(Tenant.of("few", FEW), concurrent=1),
)
REGISTRY = RegistrySettings(lease_s=30.0, heartbeat_s=0.5, timeout_s=1.0)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    with redis.Redis(port=shared_redis.port) as client:
        client.flushall()
    return shared_redis


def a_router(server: RedisServer) -> Router:
    """Exchanges when a test says so, and once at its start and end."""
    return Router(router_settings(registry=replace(REGISTRY, url=server.url), share_s=3600.0, tenants=TENANTS))


@asynccontextmanager
async def two_routers(server: RedisServer) -> AsyncIterator[tuple[House, Router]]:
    """One with the workers, and another."""
    router, other = a_router(server), a_router(server)
    made = House(router)
    try:
        await router.start()
        await other.start()
        await exchange(router, other)
        await made.add_prefill("p0", registry=REGISTRY)
        await made.add_decode("d0", registry=REGISTRY)
        await other.pool.refresh()
        yield made, other
        await made.assert_nothing_held()
    finally:
        for worker in made.workers:
            await worker.stop()
        await router.stop()
        await other.stop()


def share_of(router: Router) -> QuotaShare:
    assert router.quota_sharing is not None
    return router.quota_sharing


async def exchange(*routers: Router) -> None:
    """Twice, as the first one was not told of by those after it."""
    for router in (*routers, *routers):
        await share_of(router).exchange()


async def admitted(router: Router, key: str) -> int:
    """How many requests one after the other are, until one is refused."""
    count = 0
    async with AsyncClient(router.address, api_key=key) as client:
        while True:
            try:
                await client.complete(token_ids=(1, 2, 3), sampling=ONE_TOKEN)
            except Exhausted as error:
                assert error.reason == "TENANT_REQUESTS" and error.retry_after_ms > 0
                return count
            count += 1


async def test_together_they_admit_the_limit_and_what_came_between_two_exchanges(redis_server: RedisServer) -> None:
    async with two_routers(redis_server) as (made, other):
        began = time.monotonic()
        first = await admitted(made.router, ACME)  # all before the other can know
        unknown = await admitted(other, ACME)
        await exchange(made.router, other)
        later = [await admitted(each, ACME) for each in (made.router, other)]

        def come_back() -> float:
            return (time.monotonic() - began) * LIMIT / 60

        assert LIMIT <= first <= LIMIT + come_back() and LIMIT <= unknown <= LIMIT + come_back()
        assert first + unknown + sum(later) <= 2 * LIMIT + come_back(), "limit x routers, if all comes at once"
        # Once they know of each other the limit is one: nothing unknown comes in between.
        began = time.monotonic()
        known = await admitted(made.router, ZETA)
        await exchange(made.router, other)
        assert LIMIT <= known + await admitted(other, ZETA) <= LIMIT + come_back()
        # One that starts now has learnt of it before its first request.
        late = a_router(redis_server)
        await late.start()
        try:
            assert known + await admitted(late, ZETA) <= LIMIT + come_back()
        finally:
            await late.stop()


async def test_without_redis_each_goes_by_what_it_sees(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_routers(redis_server) as (made, other):
        redis_server.kill()
        try:
            with caplog.at_level(logging.WARNING, "router.sharing"):
                for _ in range(2):
                    await share_of(made.router).exchange()
            assert "cannot be used" in share_of(made.router).warning
            assert len([r for r in caplog.records if "limits are not shared" in r.getMessage()]) == 1, "said once"
            began = time.monotonic()
            for each in (made.router, other):
                assert LIMIT <= await admitted(each, ACME) <= LIMIT + (time.monotonic() - began) * LIMIT / 60
        finally:
            redis_server.start()
        await exchange(made.router, other)  # a Redis that lost everything is told again
        assert share_of(made.router).warning == ""
        owed = [router.quotas.told()["acme"].requests_owed for router in (made.router, other)]
        assert all(LIMIT < each <= 2 * LIMIT for each in owed), "what was too much is waited out"


async def test_one_in_flight_anywhere(redis_server: RedisServer) -> None:
    async with two_routers(redis_server) as (made, other):
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        async with (
            AsyncClient(made.router.address, api_key=FEW) as here,
            AsyncClient(other.address, api_key=FEW) as there,
        ):
            async with aclosing(here.generate(token_ids=(1, 2, 3), sampling=long)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        break
                await exchange(made.router, other)
                with pytest.raises(Exhausted) as caught:
                    await there.complete(token_ids=(1, 2, 3), sampling=ONE_TOKEN)
                assert caught.value.reason == "TENANT_CONCURRENT"
            await made.router.orchestrator.idle()
            await made.router.quota_sharing.stop()  # type: ignore[union-attr]  # tells a last time
            await share_of(other).exchange()
            await there.complete(token_ids=(1, 2, 3), sampling=ONE_TOKEN)


async def test_what_no_router_wrote_is_left_out_and_counted(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    router = a_router(redis_server)
    await router.start()
    share = share_of(router)
    try:
        with redis.Redis(port=redis_server.port) as client, caplog.at_level(logging.WARNING, "router.shared_quotas"):
            odd: dict[str, bytes] = {
                "no message": b"\xff\xff",
                "owes for ever": note_of({"acme": Usage(1, 1, 1, float("inf"), 0.0)}),
                "owes less": note_of({"acme": Usage(1, 1, 1, 0.0, -1.0)}),
                "nobody": note_of({"": Usage(1)}),
                "twice": note_of({"acme": Usage(1)}) * 2,
            }
            for name, note in odd.items():
                client.set(f"pdserve:quota:{name}", note, ex=KEEP_S)
            client.set("pdserve:quota:large", b"x" * (MAX_NOTE_BYTES + 1), ex=KEEP_S)
            client.set("pdserve:quota:for ever", b"")
            client.set("pdserve:quota:for long", b"", ex=KEEP_S + 10)
            client.hset("pdserve:quota:a hash", "a", "b")
            client.sadd("pdserve:quotas", *odd, "large", "for ever", "for long", "a hash", "gone", b"\xff")
            await share.exchange()
            assert share.ignored == len(odd) + 4 and share.warning == ""
            assert router.quotas.told() == {}
            assert client.scard("pdserve:quotas") == len(odd) + 1, "what can be no note is removed"
            await share.exchange()  # what looks like one stays until it expires
            assert share.ignored == 2 * len(odd) + 4
            assert len([r for r in caplog.records if "somebody else writes" in r.getMessage()]) == 1, "said once"
            # Another kind of key, and one that was filled up: begun anew.
            for fill in ("a text", [b"%d" % n for n in range(MAX_NAMES)]):
                if isinstance(fill, str):
                    client.set("pdserve:quotas", fill)
                else:
                    client.sadd("pdserve:quotas", *fill)
                await share.exchange()
                assert client.scard("pdserve:quotas") == 1
            assert share.ignored == 2 * len(odd) + 6 and share.warning == ""
    finally:
        await router.stop()


async def test_a_router_without_limits_tells_nothing(redis_server: RedisServer) -> None:
    plain = Router(router_settings(registry=replace(REGISTRY, url=redis_server.url)))
    assert plain.quota_sharing is None and plain.sharing is not None
    await plain.stop()


async def test_of_however_many_tenants_all_are_told_of(redis_server: RedisServer) -> None:
    tenants = [replace(Tenant.of(f"tenant-{n:05}", f"sk-{n:032}"), requests_per_minute=2) for n in range(4000)]
    one, two = Quotas(tenants, 5000), Quotas(tenants, 5000)
    registries = [RedisRegistry(redis_server.url) for _ in range(2)]
    shares = [QuotaShare(each, to.latest(), 1.0) for each, to in zip((one, two), registries, strict=True)]
    try:
        for _ in range(2):
            for share in shares:  # now they have met
                await share.exchange()
        for _ in range(2):
            with ExitStack() as running:
                for tenant in tenants:
                    running.enter_context(one.running(a_request(tenant.name, prompt=3, output=1)))
        for share in shares:
            await share.exchange()
        assert [share.warning for share in shares] == ["", ""] and shares[1].ignored == 0
        for tenant in tenants:
            error = refused(two, a_request(tenant.name, prompt=3, output=1))
            assert error is not None and error.reason == "TENANT_REQUESTS", "both of two requests are used"
        with redis.Redis(port=redis_server.port) as client:
            notes = [client.get(key) for key in client.keys("pdserve:quota:*")]
        assert all(isinstance(note, bytes) and len(note) <= MAX_NOTE_BYTES for note in notes)
    finally:
        for registry in registries:
            await registry.close()


async def test_of_more_notes_than_one_exchange_reads_none_stays_unread(redis_server: RedisServer) -> None:
    """Twenty-one routers that each need sixty notes."""
    registry = RedisRegistry(redis_server.url)
    try:
        routers = [registry.latest() for _ in range(21)]
        for router in routers:
            await router.exchange([b""] * 60)
        for reader in (routers[0], routers[-1]):
            heard: set[bytes] = set()
            for _ in range(25):
                found = await reader.exchange([b""] * 60)
                heard |= {note.by for note in found}
                assert len(found) <= MAX_NOTES
            assert len(heard) == 20 * 60 > MAX_NOTES
            assert reader.dropped == 0
    finally:
        await registry.close()


def test_a_part_fits_into_a_note_whatever_is_used_and_never_changes() -> None:
    names = [f"tenant-{n:0{1 + n % 200}}" for n in range(3000)]
    parts = parts_of(names)
    assert sorted(name for part in parts for name in part) == sorted(names)
    most = Usage(2**64 - 1, 2**64 - 1, 2**32 - 1, 1e300, 1e300)
    notes = [note_of(dict.fromkeys(part, most)) for part in parts]
    assert all(len(note) <= MAX_NOTE_BYTES for note in notes) and len(notes) < 10
    assert [tuple(read_note(note)) for note in notes] == list(parts) == list(parts_of(reversed(names)))
    with pytest.raises(InvalidRequest):
        read_note(notes[0][:-1])
