"""How long a worker takes to serve, with and without compiled kernels, and what is compiled how often.

    plain       kernels = plain: nothing is ever compiled
    first       kernels = auto with an empty folder for the library: serves with plain torch, switches when compiled
    second      the same folder again: the kept library serves from the first step

Every start is timed twice and the faster counts: a single one was once four seconds slower than its repetition. A
worker is ready when it is in a router's registry as ready and its gRPC health says SERVING; seconds count from the
start of its process, the interpreter's own included. The switch is timed on an engine that keeps stepping while the
compiler runs beside it. --quick times the starts of a tiny model without compilation.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.report import Figure, make_parser, report
from benchmarks.systems import START_S, NotAvailable, Processes, run_until_done
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.load import find_smollm2, load_model
from pdserve.engine.native.choice import KernelCounters
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.registry.client import RpcRegistry
from pdserve.registry.records import READY
from pdserve.rpc.channel import channel

READY_GOAL_S = 10.0
PLAIN_OVER_GOAL = 1.5  # ready while compiling, over ready without any compilation
BATCHES = (1, 2, 3, 5, 8, 13, 21, 32, 7, 1)
SWITCH_LIMIT_S = 300.0
STARTS = 2

CONFIG = """
[model]
path = "{model}"
[engine]
dtype = "bf16"
kernels = "{kernels}"
"""


@dataclass(frozen=True)
class Start:
    ready_s: float
    kernels: str  # what the worker says it computes with


async def start_worker(kind: str, model: Path, kernels: str, cache: Path) -> Start:
    """A router, then the worker that is timed. Raises NotAvailable when it does not come up."""
    processes = Processes()
    try:
        file = processes.folder / "pdserve.toml"
        file.write_text(CONFIG.format(model=model, kernels=kernels))
        common = [sys.executable, "-m"]
        await processes.start("router", [*common, "router", "--port", 0, "--http-port", 0])
        address = (await processes.prints("router", r"router ready: grpc (\S+)"))[1]
        registry = RpcRegistry(address)
        began = time.monotonic()
        environment = {"XDG_CACHE_HOME": str(cache)}
        command = [*common, f"{kind}_worker", "--config", file, "--registry", f"grpc://{address}"]
        await processes.start(kind, command, environment)
        try:
            kernels = await _serving(registry, processes, began)
            return Start(time.monotonic() - began, kernels)
        finally:
            await registry.close()
    finally:
        await processes.stop()


def best_start(kind: str, model: Path, kernels: str, cache: Path) -> Start:
    """The faster of two."""
    starts = [run_until_done(start_worker(kind, model, kernels, cache)) for _ in range(STARTS)]
    return min(starts, key=lambda start: start.ready_s)


async def _serving(registry: RpcRegistry, processes: Processes, began: float) -> str:
    """Waits for the only worker; returns its kernels."""
    while True:
        processes.check(time.monotonic() - began)
        for live in await registry.snapshot():
            record = live.record
            if record.state == READY and await _is_healthy(record.endpoints[0].address):
                return record.contract.info.get("kernels", "")
        await asyncio.sleep(0.02)


async def _is_healthy(address: str) -> bool:
    async with channel(address) as to:
        answer = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=START_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def switch(model: Path, kernels: str) -> tuple[float, float, KernelCounters]:
    """(seconds until the first step, until native kernels serve, counters after batches of changing sizes)."""
    loaded = load_model(model, "bf16")
    began = time.monotonic()
    engine = Engine(loaded, EngineConfig(dtype="bf16", kernels=kernels, pages=256, threads=1))
    _step(engine, 1)
    first = time.monotonic() - began
    while engine.kernels.state == "building" and time.monotonic() - began < SWITCH_LIMIT_S:
        _step(engine, 1)
    switched = time.monotonic() - began
    for batch in BATCHES:
        _step(engine, batch)
    return first, switched, engine.kernels


def _step(engine: Engine, batch: int) -> None:
    blocks = BlockManager(engine.config.pages, engine.config.page_size)
    tables = [blocks.allocate(str(number), 2) for number in range(batch)]
    engine.step(StepPlan(tuple(Chunk(str(n), (n + 1,), 0, table) for n, table in enumerate(tables))))


def measure_plain(model: Path, cache: Path, kinds: Sequence[str]) -> dict[str, Figure]:
    title = "{} worker ready, without compilation"
    return {
        kind: Figure(
            title.format(kind),
            best_start(kind, model, "plain", cache).ready_s,
            "s",
            goal=READY_GOAL_S,
            at_most=True,
        )
        for kind in kinds
    }


def measure(model: Path, cache: Path) -> list[Figure]:
    run_until_done(start_worker("decode", model, "plain", cache))  # reads every file once, and keeps its digests
    starts = measure_plain(model, cache, ("prefill", "decode"))
    figures, plain = list(starts.values()), starts["decode"].value
    started = run_until_done(start_worker("decode", model, "auto", cache))
    title = f"decode worker ready, kernels being compiled ({started.kernels}), against without compilation"
    figures.append(Figure(title, started.ready_s, "s", plain, PLAIN_OVER_GOAL, at_most=True))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        first, switched, counters = switch(model, "auto")
        figures += [
            Figure("an engine's first step, kernels being compiled", first, "s"),
            Figure("native kernels serve, after an engine's start with an empty folder", switched, "s"),
            Figure(
                f"compilations over {len(BATCHES)} batch sizes from 1 to {max(BATCHES)}",
                counters.compilations, "compilations", goal=1, at_most=True,
            ),
        ]  # fmt: skip
        if counters.state == "native":
            again = best_start("decode", model, "auto", Path(folder))
            title = f"decode worker ready, library kept ({again.kernels}), against without compilation"
            figures.append(Figure(title, again.ready_s, "s", plain, PLAIN_OVER_GOAL, at_most=True))
            first, _, counters = switch(model, "auto")
            title = "compilations of a second start"
            figures.append(Figure(title, counters.compilations, "compilations", goal=0, at_most=True))
        else:
            print(f"no native kernels here: {counters.why}", file=sys.stderr)
    return figures


def main() -> None:
    options = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        try:
            if options.quick:
                figures = list(measure_plain(tiny_checkpoint(Path(folder)), cache, ("decode",)).values())
            else:
                figures = measure(find_smollm2(), cache)
        except NotAvailable as error:
            raise SystemExit(str(error)) from error
    report(figures, options.json)


if __name__ == "__main__":
    main()
