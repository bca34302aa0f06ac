"""Two routers on one Redis: one pool, one memory of prefixes, and neither needs the other, or the Redis, to serve."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import redis

from pdserve.client import AsyncClient, Tokens
from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.prefix_notes import Sent, note_of, read_note
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.redis_board import MAX_NOTE_BYTES, MAX_NOTES
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from router.app import Router
from router.prefixes import PrefixRecord, chain
from router.settings import RouterSettings
from router.shared_prefixes import PrefixShare
from tests.engine.tiny import prompt
from tests.redis_server import RedisServer, running_redis
from tests.router.support import VOCAB, House, ids_of, router_settings

pytestmark = pytest.mark.redis
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
REGISTRY = RegistrySettings(lease_s=1.0, heartbeat_s=0.1, timeout_s=1.0)
IDS = prompt(100, seed=5, vocab=VOCAB)


def settings(server: RedisServer) -> RouterSettings:
    """Prefixes are exchanged when a test says so."""
    return router_settings(registry=replace(REGISTRY, url=server.url), share_s=3600.0)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@dataclass
class Site:
    """Workers and one router here, another router in a process of its own."""

    server: RedisServer
    house: House
    process: asyncio.subprocess.Process
    gateway: str  # of the process
    http: str

    @property
    def here(self) -> str:
        return self.house.router.address


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with running_redis() as server:
        async with AsyncExitStack() as stack:
            router = Router(settings(server))
            await router.start()
            stack.push_async_callback(router.stop)
            made = House(router)
            other, gateway, http = await stack.enter_async_context(router_process(server))
            for add, name in ((made.add_prefill, "p0"), (made.add_decode, "d0")):
                worker = await add(name, registry=REGISTRY)
                stack.push_async_callback(worker.stop)
            yield Site(server, made, other, gateway, http)
            await made.assert_nothing_held()


@asynccontextmanager
async def router_process(server: RedisServer) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    ports = ("--port", "0", "--http-port", "0", "--registry", server.url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *ports, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        words = (await process.stdout.readline()).decode().split()  # router ready: grpc A http http://B
        yield process, words[3], words[5]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def knows(gateway: str, workers: int) -> None:
    async with asyncio.timeout(20), AsyncClient(gateway) as client:
        while len([w for w in (await client.status()).workers if w.state == "ready"]) != workers:
            await asyncio.sleep(0.05)  # another process is watched from outside


async def follow(gateway: str, begun: asyncio.Event) -> list[int]:
    got: list[int] = []
    async with AsyncClient(gateway) as client:
        async for event in client.generate(token_ids=IDS, sampling=GREEDY, timeout_s=60.0):
            if isinstance(event, Tokens):
                got += event.ids
                begun.set()
    return got


async def test_a_killed_router_takes_only_its_own_streams_and_its_clients_go_to_the_other(site: Site) -> None:
    await knows(site.gateway, 2)
    undisturbed = await follow(site.here, asyncio.Event())
    begun = [asyncio.Event() for _ in range(4)]
    places = [site.here, site.gateway, site.here, site.gateway]
    streams = [asyncio.create_task(follow(*where)) for where in zip(places, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    site.process.send_signal(signal.SIGKILL)
    ended = await asyncio.gather(*streams, return_exceptions=True)
    assert [ended[0], ended[2]] == [undisturbed] * 2
    assert all(isinstance(each, PdserveError) for each in (ended[1], ended[3]))
    assert await follow(site.here, asyncio.Event()) == undisturbed, "asked again at the other router"


def readyz(http: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"{http}/readyz", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


async def warned(gateway: str, warned: bool) -> str:
    async with asyncio.timeout(20), AsyncClient(gateway) as client:
        while bool(warning := (await client.status()).registry_warning) != warned:
            await asyncio.sleep(0.05)
    return warning


@pytest.mark.parametrize("trouble", ["gone", "full"])
async def test_without_redis_both_serve_on_with_a_warning_until_it_is_back(
    site: Site, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    await knows(site.gateway, 2)
    undisturbed = await follow(site.here, asyncio.Event())
    begun = asyncio.Event()
    with caplog.at_level(logging.WARNING, "router.pool"):
        stream = asyncio.create_task(follow(site.gateway, begun))
        await begun.wait()
        if trouble == "gone":
            site.server.kill()
        else:
            with redis.Redis(port=site.server.port) as client:
                client.config_set("maxmemory", 1)
        for gateway in (site.here, site.gateway):
            text = await warned(gateway, True)
            assert "serving from the last known pool" in text and ("OOM" in text) == (trouble == "full")
        await asyncio.sleep(REGISTRY.lease_s + 0.5)  # past every lease
        for gateway in (site.here, site.gateway):
            assert await follow(gateway, asyncio.Event()) == undisturbed
        assert await stream == undisturbed
        status, body = await asyncio.to_thread(readyz, site.http)
        assert status == 200 and "last known pool" in str(body["warning"])
        assert await asyncio.to_thread(readyz, f"http://{site.house.router.http_address}") == (200, body | {})
    assert len([r for r in caplog.records if "last known pool" in r.getMessage()]) == 1, "said once"
    if trouble == "gone":
        site.server.start()
    else:
        with redis.Redis(port=site.server.port) as client:
            client.config_set("maxmemory", 0)
    for gateway in (site.here, site.gateway):
        await warned(gateway, False)
        await knows(gateway, 2)
        assert await follow(gateway, asyncio.Event()) == undisturbed


async def test_what_one_router_sent_where_the_other_knows(redis_server: RedisServer) -> None:
    """Also one that starts later; not under another tenant; and never with a round trip in a request."""
    router, other = Router(settings(redis_server)), Router(settings(redis_server))
    made = House(router)
    await router.start()
    await other.start()
    try:
        prefill, decode = await made.add_prefill("p0"), await made.add_decode("d0")
        await other.pool.refresh()
        assert ids_of(await made.generate(IDS, max_tokens=2))
        digest = prefill.contract.digest()
        held = {prefill.incarnation: 96, decode.incarnation: 96}
        assert router.sharing is not None and other.sharing is not None
        for each in (router.sharing, other.sharing):
            await each.exchange()
        late = Router(settings(redis_server))
        await late.start()
        assert late.sharing is not None
        await late.sharing.exchange()
        for knows_it in (router, other, late):
            assert knows_it.orchestrator.prefixes.held_tokens(chain(IDS, digest, None, "default")) == held
            assert knows_it.orchestrator.prefixes.held_tokens(chain(IDS, digest, None, "another")) == {}
        # Without the Redis requests are served as before.
        redis_server.kill()
        assert ids_of(await made.generate(IDS, max_tokens=2))
        await router.sharing.exchange()
        assert "cannot be used" in router.sharing.warning
        redis_server.start()
        await router.sharing.exchange()
        assert router.sharing.warning == ""
        await late.stop()
        await made.assert_nothing_held()
    finally:
        for worker in made.workers:
            await worker.stop()
        for each_router in (router, other):
            await each_router.stop()


class Kept:
    """A board in this process."""

    def __init__(self, *notes: bytes) -> None:
        self.notes = notes

    async def exchange(self, note: bytes) -> tuple[bytes, ...]:
        return self.notes


async def test_what_others_write_is_bounded_and_damage_is_left_out() -> None:
    boot = b"b" * 16
    links = chain(IDS, b"c", None, "t")
    known = PrefixRecord(1000)
    known.share()
    known.record(links, boot)
    good = note_of(known.news())
    odd = [
        Sent((b"short",), (boot,)),
        Sent(tuple(link[:16] for link in links), (b"no boot",)),
        Sent((b"k" * 16,) * 1025, (boot,)),
        Sent((b"k" * 16,), (boot,) * 9),
    ]
    record = PrefixRecord(1000)
    await PrefixShare(record, Kept(b"\xff\xff", *(note_of([each]) for each in odd), good), 1.0).exchange()
    assert len(record) == len(links) and record.held_tokens(links) == {boot: 96}
    # Of more than fits into a note the newest is told.
    many = [Sent((bytes([n]) * 16,) * 1000, (boot,)) for n in range(10)]
    note = note_of(many)
    assert len(note) <= MAX_NOTE_BYTES
    assert [sent.keys[0][0] for sent in read_note(note)] == [6, 7, 8, 9]


async def test_the_board_keeps_the_newest_notes_and_goes_when_nobody_uses_it(redis_server: RedisServer) -> None:
    registries = [RedisRegistry(redis_server.url) for _ in range(2)]
    writer, reader = (registry.board() for registry in registries)
    for number in range(MAX_NOTES + 50):
        assert await writer.exchange(b"%d" % number + b"x" * 5000) == (), "its own"
    seen: list[bytes] = []
    while notes := await reader.exchange(b""):
        seen += notes
    assert MAX_NOTES <= len(seen) < MAX_NOTES + 50 and seen[-1].startswith(b"%d" % (MAX_NOTES + 49))
    with redis.Redis(port=redis_server.port) as client:
        assert 0 < client.ttl("pdserve:prefixes") <= 3600
        client.flushall()
    await writer.exchange(b"new")
    assert await reader.exchange(b"") == (b"new",)
    redis_server.kill()
    with pytest.raises(Unavailable):
        await reader.exchange(b"")
    redis_server.start()
    await writer.exchange(b"again")
    assert await reader.exchange(b"") == (b"again",)
    for registry in registries:
        await registry.close()


def test_one_boot_per_worker_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    known = PrefixRecord(10)
    links: Sequence[bytes] = chain(IDS, b"c", None, "t")
    known.record(tuple(links), b"a" * 16)
    assert list(known.news()) == [], "a router without others keeps nothing for them"
    known.share()
    known.record(tuple(links), b"a" * 16, b"a" * 16)
    assert [sent.incarnations for sent in known.news()] == [(b"a" * 16,)]
    assert list(known.news()) == [], "told once"
