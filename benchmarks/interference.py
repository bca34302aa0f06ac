"""What arriving caches do to sequences that are decoding: p99 inter-token latency, with over without.

Eight streams run on a decode worker. In turn, nothing arrives, and prompts of 2,000 tokens arrive one
right after the other from a prefill worker in a process of its own, each worker with one thread.
The turns alternate while contexts grow, so both see the same lengths. A gap is the time between two
messages of one stream, as its reader sees them.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine import tiny_checkpoint
from benchmarks.pair import Pair, WorkerProcess, drive, random_prompt
from benchmarks.report import Figure, make_parser, report
from decode_worker.settings import DecodeSettings
from pdserve.engine.load import find_smollm2
from pdserve.engine.plan import EngineConfig
from prefill_worker.settings import PrefillSettings

GOAL = 1.5


@dataclass(frozen=True)
class Plan:
    streams: int
    stream_prompt: int  # tokens
    stream_output: int  # tokens; then the stream starts anew
    arriving: int  # tokens of each prompt that arrives
    pages: int
    turns: int  # of each kind
    turn_s: float
    vocab: int


FULL = Plan(
    streams=8, stream_prompt=64, stream_output=1500, arriving=2000, pages=1280, turns=3, turn_s=15.0, vocab=49152
)
QUICK = Plan(streams=8, stream_prompt=8, stream_output=300, arriving=200, pages=256, turns=1, turn_s=2.0, vocab=512)


@dataclass
class Meter:
    """Gaps in seconds, by whether caches were arriving."""

    arriving: bool = False
    gaps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    handoffs: int = 0

    def p99(self, arriving: bool) -> float:
        gaps = torch.tensor(self.gaps[arriving], dtype=torch.float64)
        return float(gaps.quantile(0.99))


async def stream(pair: Pair, plan: Plan, meter: Meter, number: int, running: asyncio.Barrier) -> None:
    """Streams without end; every gap goes to the meter's present turn."""
    waiting = True
    for turn in itertools.count():
        last = 0.0
        prompt = random_prompt(plan.stream_prompt, 1000 * number + turn, plan.vocab)
        async for _ in pair.generate(prompt, plan.stream_output):
            now = time.perf_counter()
            if last:
                meter.gaps[meter.arriving].append(now - last)
            last = now
            if waiting:
                waiting = False
                await running.wait()
                last = time.perf_counter()


async def arrive(pair: Pair, plan: Plan, meter: Meter) -> None:
    """Prompts that share no prefix, one after the other."""
    while True:
        await pair.handoff(random_prompt(plan.arriving, 10**6 + meter.handoffs, plan.vocab))
        meter.handoffs += 1


async def measure(plan: Plan, prefill: str, decode: str) -> list[Figure]:
    meter = Meter()
    async with drive(prefill, decode) as pair:
        await pair.handoff(random_prompt(plan.arriving, 1, plan.vocab))  # warms both workers up
        running = asyncio.Barrier(plan.streams + 1)
        streams = [asyncio.create_task(stream(pair, plan, meter, n, running)) for n in range(plan.streams)]
        starting = asyncio.create_task(running.wait())
        await asyncio.wait({starting, *streams}, return_when=asyncio.FIRST_COMPLETED)
        for number in range(plan.turns):
            print(f"turn {number + 1} of {plan.turns}", file=sys.stderr, flush=True)
            await turn(streams, plan.turn_s)
            meter.arriving = True
            arrivals = asyncio.create_task(arrive(pair, plan, meter))
            await turn([arrivals, *streams], plan.turn_s)
            await cancel([arrivals])
            meter.arriving = False
        await cancel(streams)
    arrived_per_s = meter.handoffs / (plan.turns * plan.turn_s)
    idle, busy = 1000 * meter.p99(False), 1000 * meter.p99(True)
    name = f"p99 inter-token latency of {plan.streams} streams while prompts of {plan.arriving} tokens arrive"
    return [
        Figure(name, busy, "ms", idle, GOAL, at_most=True),
        Figure("prompts that arrived meanwhile", arrived_per_s, "per second"),
    ]


async def turn(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Lets everything run for a while; raises the error of a task that ends, since none should."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def run(path: Path, plan: Plan) -> list[Figure]:
    engine = EngineConfig(dtype="bf16", pages=plan.pages, threads=1)
    workers = [WorkerProcess(path, PrefillSettings(engine=engine)), WorkerProcess(path, DecodeSettings(engine=engine))]
    try:
        prefill, decode = [worker.started() for worker in workers]
        return asyncio.run(measure(plan, prefill, decode))
    finally:
        for worker in workers:
            worker.stop()


def main() -> None:
    options = make_parser(__doc__).parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(tiny_checkpoint(Path(folder)), QUICK)
    else:
        figures = run(find_smollm2(), FULL)
    report(figures, options.json)


if __name__ == "__main__":
    main()
