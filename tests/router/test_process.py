"""The router as a process: what it imports, how it starts, what it says when it cannot, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace

import httpx
import pytest

from pdserve.client import AsyncClient
from pdserve.errors import ConfigError, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.service import add_registry
from pdserve.request import SamplingParams
from pdserve.rpc.events import Accepted
from pdserve.rpc.server import Server
from pdserve.rpc.settings import RpcSettings
from router.app import Router
from router.request import Ask, TokenPrompt
from router.settings import RouterSettings
from tests.router.support import MODEL, REGISTRY, finish_of, house, router_settings

HEAVY = ("torch", "ray", "numpy", "transformers", "gguf", "pdserve.engine", "prefill_worker", "decode_worker")


def test_the_router_imports_nothing_heavy() -> None:
    code = "import json, sys, router.app, router.__main__; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(out.stdout))
    assert "router.orchestrate" in loaded
    assert not {name for name in loaded if name in HEAVY or name.startswith(tuple(f"{h}." for h in HEAVY))}


async def test_a_process_says_when_it_is_ready_and_drains_on_sigterm() -> None:
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--port", "0", "--http-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert router.stdout is not None
        async with asyncio.timeout(30):
            words = (await router.stdout.readline()).decode().split()
        assert words[:3] == ["router", "ready:", "grpc"]
        address, url = words[3], words[5]
        async with AsyncClient(address) as client, httpx.AsyncClient() as http:
            assert (await client.status()).registry == "memory"
            assert (await http.get(f"{url}/healthz")).status_code == 200
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, errors = await router.communicate()
        assert (router.returncode, errors) == (0, b"")
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
async def test_a_port_in_use_is_one_clear_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        others = {"--port": "0", "--http-port": "0"} | {flag: port}
        command = [sys.executable, "-m", "router", *(word for pair in others.items() for word in pair)]
        out = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert out.returncode == 2
    (line,) = out.stderr.splitlines()
    assert port in line and "port" in line and "Traceback" not in line


async def test_a_registry_that_is_down_at_start_is_a_clear_error_and_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    url = "grpc://127.0.0.1:1"
    router = Router(router_settings(registry=replace(REGISTRY, url=url)))
    with pytest.raises(Unavailable):
        await router.start()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"host": "0.0.0.0"}, "allow_plaintext"),
        ({"http_host": "0.0.0.0"}, "allow_plaintext"),
        ({"port": 70000}, "router.port"),
        ({"max_active": 0}, "router.max_active"),
        ({"request_timeout_s": float("inf")}, "router.request_timeout_s"),
        ({"tenant": ""}, "router.tenant"),
        ({"grace_s": -1}, "router.grace_s"),
    ],
)
async def test_settings_that_cannot_work_are_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Router(RouterSettings(**changes))  # type: ignore[arg-type]
    assert caught.value.field == field


async def test_plaintext_beyond_loopback_needs_leave() -> None:
    with pytest.raises(ConfigError) as caught:
        Router(router_settings(host="0.0.0.0"))
    assert caught.value.reason == "PLAINTEXT_REFUSED"
    router = Router(router_settings(host="0.0.0.0", rpc=RpcSettings(allow_plaintext=True)))
    await router.start()
    assert router.address.startswith("0.0.0.0:")
    await router.stop()


async def test_start_and_stop_leave_no_task() -> None:
    before = asyncio.all_tasks()
    for _ in range(2):
        router = Router(router_settings())
        await router.start()
        await router.stop()
        await router.stop()
    assert asyncio.all_tasks() == before


async def test_draining_lets_a_running_answer_finish_and_takes_no_new_one() -> None:
    async with house() as made:
        router = made.router
        ask = Ask(TokenPrompt(tuple(range(1, 40))), SamplingParams(max_tokens=100, ignore_eos=True))
        async with aclosing(router.orchestrator.generate(await router.intake.take(ask))) as events:
            assert isinstance(await anext(events), Accepted)
            drain = asyncio.create_task(router.drain(10.0))
            rest = [event async for event in events]
        assert finish_of(rest).usage.output_tokens == 100
        async with asyncio.timeout(10):
            await drain
        async with AsyncClient(router.address) as client:
            with pytest.raises(Unavailable):
                await client.status()


async def test_a_drain_without_grace_ends_streams_and_their_work() -> None:
    async with house() as made, httpx.AsyncClient(timeout=20) as http:
        url = f"http://{made.router.http_address}/v1/chat/completions"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
        async with http.stream("POST", url, json=body) as answer:
            await anext(answer.aiter_lines())
            async with asyncio.timeout(10):
                await made.router.drain(0.0)
            async with asyncio.timeout(5):
                await made.router.orchestrator.idle()
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_serving_goes_on_while_the_registry_is_away() -> None:
    """The registry is a process of its own here; workers and router share it over gRPC."""
    server = Server()
    add_registry(server, MemoryRegistry())
    url = f"grpc://{await server.start()}"
    async with house(registry=replace(REGISTRY, url=url)) as made:
        before = await made.generate(range(1, 20), max_tokens=5)
        await server.stop()
        await made.router.pool.refresh()
        async with asyncio.timeout(REGISTRY.lease_s + 10):
            for _ in range(3):
                answer = await made.generate(range(1, 20), max_tokens=5)
                assert finish_of(answer).usage == replace(
                    finish_of(before).usage, cached_prompt_tokens=finish_of(answer).usage.cached_prompt_tokens
                )
        async with AsyncClient(made.router.address) as client:
            status = await client.status()
        assert "registry unreachable" in status.registry_warning
        assert {worker.worker_id for worker in status.workers} == {"p0", "d0"}
