"""A real installation: `python -m router`, `-m prefill_worker` and `-m decode_worker`, and a Redis between them."""

from __future__ import annotations

import asyncio
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.client import AsyncClient
from pdserve.client.status import Status
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.loaded import LoadedModel
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.stack import pause
from tests.engine.tiny import spec, tiny_model
from tests.redis_server import RedisServer, running_redis

START_S = 120.0  # importing torch takes seconds, and more when the machine is busy
WAIT_S = 30.0
LEASE_S = 3.0
CONTEXT = 4096
WORKERS = ("d0", "d1", "p0", "p1")  # as a status lists them

CONFIG = f"""
[model]
path = "{{model}}"
name = "tiny"

[engine]
dtype = "fp32"
pages = {CONTEXT // 4}
page_size = 4
deterministic = true

[decode.engine]
pages = {6 * CONTEXT // 8}
page_size = 8
axis_order = "nhd"

[registry]
url = "{{url}}"
lease_s = {LEASE_S}
heartbeat_s = 0.5
timeout_s = 1.0

[router]
port = 0
http_port = 0
refresh_s = 0.1
"""


def model() -> LoadedModel:
    """Long answers, so that a worker can be killed in the middle of one."""
    return tiny_model(spec(context_limit=CONTEXT))


class Process:
    """One `python -m MODULE ARGUMENTS` at a time; its standard error goes to a file."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, "-m", module, *arguments]
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)

    def read_ready(self) -> str:
        """The line by which it says that it serves. Raises AssertionError with its log if it does not."""
        stream = self.running.stdout
        assert stream is not None
        end, line = time.monotonic() + START_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                ready = selector.select(max(0.0, end - time.monotonic()))
                piece = stream.read1(4096) if ready else b""  # type: ignore[attr-defined]
                assert piece, f"{self._command} did not start:\n{self.log.read_text()}"
                line += piece
        text = line.decode()
        assert " ready: " in text
        return text

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None
        return self._popen

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def wait(self) -> int:
        """The exit status, within `WAIT_S`."""
        status = self.running.wait(WAIT_S)
        if self.running.stdout is not None:
            self.running.stdout.close()
        return status

    def kill(self) -> None:
        """SIGKILL: no word to anybody."""
        if self.alive:
            self.send(signal.SIGKILL)
        if self._popen is not None:
            self.wait()


class Installation:
    """Two workers of each pool, a router, a Redis. start() -> running -> stop()."""

    def __init__(self, directory: Path, redis: RedisServer) -> None:
        checkpoint, config = directory / "tiny.pdmodel", directory / "pdserve.toml"
        save_spec_checkpoint(checkpoint, model().spec, model().tensors)
        config.write_text(CONFIG.format(model=checkpoint, url=redis.url))
        self.config = config
        self.redis = redis
        self.router = Process("router", ["--config", str(config)], directory / "router.log")
        self.workers = {
            name: Process(
                "prefill_worker" if name.startswith("p") else "decode_worker",
                ["--config", str(config), "--worker-id", name],
                directory / f"{name}.log",
            )
            for name in WORKERS
        }
        self.address = ""  # of the gateway

    def start(self) -> None:
        for process in (self.router, *self.workers.values()):
            process.start()
        ready = self.router.read_ready()
        found = re.search(r"grpc (\S+) http", ready)
        assert found is not None, ready
        self.address = found[1]
        for process in self.workers.values():
            process.read_ready()

    def revive(self) -> None:
        """Starts again what a test has killed."""
        dead = [process for process in self.workers.values() if not process.alive]
        for process in dead:
            process.kill()  # closes its pipe
            process.start()
        for process in dead:
            process.read_ready()

    def stop(self) -> None:
        for process in (*self.workers.values(), self.router):
            process.kill()


@contextmanager
def installation(directory: Path) -> Iterator[Installation]:
    with running_redis() as redis:
        made = Installation(directory, redis)
        try:
            made.start()
            yield made
        finally:
            made.stop()


async def until(client: AsyncClient, holds: Callable[[Status], bool], within_s: float = WAIT_S) -> Status:
    """The first status, asked for a few times a second, of which something holds."""
    end = time.monotonic() + within_s
    while not holds(status := await client.status()):
        assert time.monotonic() < end, f"{_brief(status)} after {within_s:g} s"
        await pause(0.05)
    return status


def _brief(status: Status) -> str:
    workers = [(w.worker_id, w.state, w.load.running, w.load.waiting, round(w.lease_left_s, 1)) for w in status.workers]
    return f"{workers} {status.registry_warning}"


def names(status: Status) -> tuple[str, ...]:
    return tuple(worker.worker_id for worker in status.workers)


async def check_free(client: AsyncClient, within_s: float = WAIT_S, rpc: RpcSettings | None = None) -> None:
    """Soon no worker that is left holds a page, as each of them tells it."""
    async with asyncio.timeout(within_s):
        for worker in (await client.status()).workers:
            async with channel(worker.addresses[0], rpc) as link:
                stub = worker_pb2_grpc.WorkerStub(link)
                while (accounts := await stub.Accounts(worker_pb2.AccountsRequest(), timeout=WAIT_S)).holdings:
                    await pause(0.05)
                assert accounts.intact and not accounts.pages_held, accounts
                assert accounts.pages_free + accounts.pages_cached == accounts.pages_total
