"""What surrounds the service in its process and on its machine: proxies, children, event loops, ports, silence."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient, Client
from pdserve.client.events import Tokens
from pdserve.errors import ConfigError, Internal
from pdserve.request import SamplingParams
from pdserve.rpc.server import Server
from pdserve.rpc.settings import RpcSettings, split_address
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.settings import RouterSettings
from tests.e2e.stack import Stack, alone, pair, pause, streaming
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt, tiny_engine

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
LONG = SamplingParams(temperature=0, seed=0, max_tokens=120)
IDS = prompt(20)

OPEN_FILES = """
import os
for name in os.listdir("/proc/self/fd"):
    try:
        print(name, os.readlink(f"/proc/self/fd/{name}"))
    except FileNotFoundError:  # the listing itself
        pass
"""


@pytest.mark.parametrize("upper", [False, True], ids=["lower", "upper"])
async def test_a_proxy_in_the_environment_sees_nothing(monkeypatch: pytest.MonkeyPatch, upper: bool) -> None:
    """Nobody listens at the proxy's address: whoever asks it fails."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name.upper() if upper else name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with pair() as made:
        assert (await made.ask(IDS, GREEDY)).ids == alone(IDS, GREEDY).ids

        def sync() -> tuple[int, ...]:
            with Client(made.router.address) as client:
                return client.complete(token_ids=IDS, sampling=GREEDY, timeout_s=WAIT_S).ids

        assert await asyncio.to_thread(sync) == alone(IDS, GREEDY).ids


async def test_children_born_under_traffic_disturb_nothing_and_inherit_nothing() -> None:
    """A command, and a bare fork; every listener and connection stays with its parent."""
    async with pair() as made, streaming(made, IDS, LONG) as events:
        before = {int(name) for name in os.listdir("/proc/self/fd")}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", OPEN_FILES), stdout=subprocess.PIPE, close_fds=False
        )
        async with asyncio.timeout(WAIT_S):
            out, _ = await child.communicate()
        inherited = [line for line in out.decode().splitlines() if "socket:" in line and int(line.split()[0]) in before]
        assert child.returncode == 0 and out and not inherited
        forked = os.fork()
        if not forked:
            os._exit(0)
        assert await asyncio.to_thread(os.waitpid, forked, 0) == (forked, 0)
        ids = [token async for event in events if isinstance(event, Tokens) for token in event.ids]
        assert tuple(ids) == alone(IDS, LONG).ids[-len(ids) :]
        assert (await made.ask(IDS, GREEDY)).ids == alone(IDS, GREEDY).ids


async def test_event_loops_have_clients_of_their_own() -> None:
    """Loops in other threads, one after the other and at once; a client taken to another loop says so."""

    def elsewhere(made: Stack) -> list[tuple[int, ...]]:
        async def ask() -> tuple[int, ...]:
            async with AsyncClient(made.router.address) as client:
                return (await client.complete(token_ids=IDS, sampling=GREEDY, timeout_s=WAIT_S)).ids

        return [asyncio.run(ask()) for _ in range(3)]

    def stray(client: AsyncClient) -> None:
        with pytest.raises(Internal) as caught:
            asyncio.run(client.complete(token_ids=IDS, sampling=GREEDY, timeout_s=WAIT_S))
        assert caught.value.reason == "WRONG_EVENT_LOOP"

    async with pair() as made:
        expected = alone(IDS, GREEDY).ids
        here = asyncio.gather(*(made.ask(IDS, GREEDY) for _ in range(3)))
        there = await asyncio.gather(*(asyncio.to_thread(elsewhere, made) for _ in range(2)))
        assert there == [[expected] * 3] * 2
        assert [answer.ids for answer in await here] == [expected] * 3
        await asyncio.to_thread(stray, made.client)
        assert (await made.ask(IDS, GREEDY)).ids == expected


def connections(address: str) -> set[int]:
    """Local ports of this process's connections to an address."""
    _, port = split_address(address)
    found = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.port for c in found if c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED}


@pytest.mark.slow
async def test_probes_through_a_long_silence_cost_no_connection() -> None:
    """gRPC probes once a second at most. First nothing comes for three of them, then nobody asks for two."""
    prefill = engine()
    eager = RpcSettings(keepalive_s=0.1, keepalive_timeout_s=5.0)
    patient = RpcSettings(min_ping_interval_s=60.0)  # every probe but the first comes too early
    async with pair(prefill, rpc=patient) as made, AsyncClient(made.router.address, eager) as client:
        await client.status()
        connected = connections(made.router.address)
        assert len(connected) == 1
        with prefill.held():
            asking = asyncio.create_task(client.complete(token_ids=IDS, sampling=GREEDY, timeout_s=WAIT_S))
            async with asyncio.timeout(WAIT_S):
                await prefill.inside.wait()
            await pause(3.2)
            assert not asking.done()
        assert (await asking).ids == alone(IDS, GREEDY).ids
        await pause(2.2)
        assert (await client.complete(token_ids=IDS, sampling=GREEDY, timeout_s=WAIT_S)).ids
        assert connections(made.router.address) == connected


Start = Callable[[int], Any]
OTHERS: dict[str, Start] = {
    "prefill": lambda port: PrefillWorker(tiny_engine(), None, PrefillSettings(port=port)),
    "decode": lambda port: DecodeWorker(tiny_engine(), None, DecodeSettings(port=port)),
    "transfer": lambda port: DecodeWorker(tiny_engine(), None, DecodeSettings(transfer_port=port, port=0)),
    "router": lambda port: Router(RouterSettings(port=port, http_port=0)),
    "http": lambda port: Router(RouterSettings(port=0, http_port=port)),
}


@pytest.mark.parametrize("start", OTHERS.values(), ids=OTHERS.keys())
async def test_a_port_in_use_is_named_and_nothing_is_left(start: Start) -> None:
    before = asyncio.all_tasks()
    async with AsyncExitStack() as opened:
        first = Server()
        address = await first.start()
        opened.push_async_callback(first.stop)
        second = start(split_address(address)[1])
        with pytest.raises(ConfigError) as caught:
            await second.start()
        assert address in str(caught.value) and "port" in caught.value.field and caught.value.remedy
        await second.stop()
    assert not {t.get_name() for t in asyncio.all_tasks() - before if not t.get_name().startswith("Task-")}
