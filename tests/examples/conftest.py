"""One installation for all examples: a router and one worker of each pool, with the packaged model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from tests.e2e.processes import Process, check_free, until


@dataclass(frozen=True)
class Served:
    gateway: str  # host:port of the gRPC gateway
    http: str  # host:port of the OpenAI HTTP API
    adapters: Path  # the workers' adapter_root


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (adapters := folder / "adapters").mkdir()
    router = Process("router", ["--port", "0", "--http-port", "0"], folder / "router.log")
    router.start()
    workers: list[Process] = []
    try:
        ready = router.read_ready()
        found = re.search(r"grpc (\S+) http http://(\S+)", ready)
        assert found is not None, ready
        arguments = ["--model", "smollm2", "--registry", f"grpc://{found[1]}", "--port", "0"]
        arguments += ["--adapter-root", str(adapters)]
        workers.append(Process("prefill_worker", arguments, folder / "prefill.log"))
        workers.append(Process("decode_worker", [*arguments, "--transfer-port", "0"], folder / "decode.log"))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.read_ready()
        made = Served(found[1], found[2], adapters)
        asyncio.run(_wait_for_a_pair(made))
        yield made
        asyncio.run(check_nothing_held(made))
    finally:
        for process in (*workers, router):
            process.kill()


async def _wait_for_a_pair(served: Served) -> None:
    async with AsyncClient(served.gateway) as client:
        await until(client, lambda status: any(pair.fits for pair in status.pairs))


async def check_nothing_held(served: Served) -> None:
    """Soon no request is in flight, and no worker holds a page for one."""
    async with AsyncClient(served.gateway) as client:
        await until(client, lambda status: not status.active_requests)
        await check_free(client)
