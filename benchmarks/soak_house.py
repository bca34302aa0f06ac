"""A deployment of separate processes that is kept up: a router, two workers of each pool, and who replaces the dead.

What replaces them is this module, in the way of Ray Serve's controller or of systemd: a process that has ended is
started again at once, under its name. Ray itself would take a good part of two cores for its own processes, which
`tests/ray` runs with.

    serving --SIGKILL, or SIGTERM and its drain--> ended --started again--> ready
    serving --SIGSTOP--> frozen, for some seconds --SIGCONT--> ready
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.systems import NotAvailable, Processes
from pdserve.client import AsyncClient, Status
from pdserve.errors import PdserveError
from pdserve.rpc.background import set_within
from pdserve.rpc.channel import channel
from pdserve.v1 import worker_pb2, worker_pb2_grpc

READY_S = 120.0
WORKERS = ("d0", "d1", "p0", "p1")  # as a status lists them
ROUTER = "router"
KILLS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")
FROZEN_S = (1.0, 12.0)  # a lease is 5 seconds
_TASKS = r"^\w+_event_loop_tasks(?:\{.*\})? (\S+)$"


@dataclass(frozen=True)
class Kill:
    victim: str
    way: str  # the signal
    at: float  # monotonic seconds
    ready_after_s: float  # since the signal


@dataclass
class House:
    """Made by `open_house`; belongs to the event loop that opened it.

    `unasked` are workers that ended although nobody told them to, with the end of their log.
    """

    processes: Processes
    config: Path
    grpc: str = ""
    http: str = ""  # host:port
    kills: list[Kill] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    _starts: dict[str, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)  # to end
    _addresses: dict[str, str] = field(default_factory=dict)  # of those that are up
    _keepers: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, name: str) -> None:
        """Starts a process; returns once it has said that it serves."""
        self._starts[name] = self._starts.get(name, -1) + 1
        command: list[Any] = [sys.executable, "-m", "router", "--config", self.config]
        if name != ROUTER:
            module = "prefill_worker" if name.startswith("p") else "decode_worker"
            command = [sys.executable, "-m", module, "--config", self.config, "--worker-id", name]
            command += ["--registry", f"grpc://{self.grpc}"]
        await self.processes.start(self.life(name), command)
        if name == ROUTER:
            ready = await self._ready(name, r"router ready: grpc (\S+) http http://(\S+)")
            self.grpc, self.http = ready[1], ready[2]
        else:
            self._addresses[name] = (await self._ready(name, r"worker ready: (\S+)"))[1]

    def life(self, name: str) -> str:
        """Of a name that is used again and again, the process that has it now."""
        return f"{name}.{self._starts[name]}"

    @property
    def lives(self) -> dict[str, int]:
        """Processes that are up, by life, and their process ids."""
        return {self.life(name): self.processes.pid(self.life(name)) for name in (ROUTER, *self._addresses)}

    async def _ready(self, name: str, pattern: str) -> re.Match[str]:
        life, until = self.life(name), time.monotonic() + READY_S
        while (found := re.search(pattern, self.processes.printed(life))) is None:
            if time.monotonic() > until or life not in self.processes.names():
                raise NotAvailable(f"{life} does not serve:\n{self.processes.printed(life)[-3000:]}")
            await asyncio.sleep(0.05)
        return found

    async def keep(self, name: str) -> None:
        """Starts a worker again whenever it has ended."""
        while True:
            life = self.life(name)
            status = await self.processes.ended(life)
            self._addresses.pop(name, None)
            if life not in self._told:
                self.unasked.append(f"{life} ended with {status}:\n{self.processes.printed(life)[-2000:]}")
            await self.start(name)

    def keep_all(self) -> None:
        self._keepers += [asyncio.create_task(self.keep(name), name=f"keep {name}") for name in WORKERS]

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self.processes.stop()

    async def all_here(self, client: AsyncClient) -> None:
        """Returns once every worker is ready where it is now. Raises NotAvailable."""
        until = time.monotonic() + READY_S
        while not self._complete(status := await _status(client)):
            if time.monotonic() > until:
                raise NotAvailable(f"not all workers are ready: {status}")
            await asyncio.sleep(0.2)

    def _complete(self, status: Status | None) -> bool:
        if status is None or status.registry_warning or len(self._addresses) < len(WORKERS):
            return False
        there = {worker.worker_id: worker for worker in status.workers if worker.state == "ready"}
        return all(name in there and address in there[name].addresses for name, address in self._addresses.items())

    async def kill(self, victim: str, way: str, frozen_s: float, client: AsyncClient) -> Kill:
        """Strikes, and returns once the victim serves again."""
        at, life = time.monotonic(), self.life(victim)
        if way == "SIGSTOP":
            self.processes.send(life, signal.SIGSTOP)
            await asyncio.sleep(frozen_s)
            self.processes.send(life, signal.SIGCONT)
            await asyncio.sleep(0.5)  # its next heartbeat, or the news that it is gone
        else:
            self._told.add(life)
            self._addresses.pop(victim, None)
            self.processes.send(life, signal.Signals[way])
        await self.all_here(client)
        return Kill(victim, way, at, time.monotonic() - at)

    async def kill_until(
        self,
        resting: asyncio.Event,
        drawn: random.Random,
        pause_s: float,
        victims: Sequence[str],
        client: AsyncClient,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        """One after the other, each a while after the last victim was ready and `ready` was done."""
        while not await set_within(resting, drawn.expovariate(1 / pause_s)):
            frozen_s = drawn.uniform(*FROZEN_S)
            self.kills.append(await self.kill(drawn.choice(victims), drawn.choice(KILLS), frozen_s, client))
            await ready()

    async def tasks(self, client: AsyncClient, key: str) -> dict[str, int]:
        """Tasks of each process's event loop, by life, as their metrics pages tell.

        Args:
            key: an operator's.
        """
        status = await client.status(timeout_s=10.0)
        pages = {self.life(worker.worker_id): worker.metrics for worker in status.workers}
        pages[self.life(ROUTER)] = self.http
        found = {}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=10.0) as pull:
            for life, address in pages.items():
                page = (await pull.get(f"http://{address}/metrics")).raise_for_status().text
                found[life] = sum(int(float(value)) for value in re.findall(_TASKS, page, re.MULTILINE))
        return found

    async def accounts(self) -> dict[str, worker_pb2.AccountsResponse]:
        """Of every worker that is up and answers, by life."""
        found = {}
        for name, address in dict(self._addresses).items():
            async with channel(address) as link:
                stub: Any = worker_pb2_grpc.WorkerStub(link)
                found[self.life(name)] = await stub.Accounts(worker_pb2.AccountsRequest(), timeout=10.0)
        return found


async def _status(client: AsyncClient) -> Status | None:
    try:
        return await client.status(timeout_s=10.0)
    except PdserveError:
        return None


def toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Tables of texts, numbers, truth values and lists of them, which TOML writes as JSON does."""
    lines = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def open_house(config: str, logs: Path | None = None, workers: Sequence[str] = WORKERS) -> AsyncIterator[House]:
    """A deployment that serves. Raises NotAvailable."""
    processes = Processes(logs)
    try:
        file = processes.folder / "pdserve.toml"
        file.write_text(config)
        house = House(processes, file)
        await house.start(ROUTER)
        await asyncio.gather(*map(house.start, workers))
        try:
            yield house
        finally:
            await house.close()
    finally:
        await processes.stop()
