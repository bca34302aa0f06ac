"""What arriving caches do to sequences that are decoding: p99 inter-token latency, with over without.

Eight streams run on a decode worker. In turn, nothing else happens (idle); a prefill worker in a process of its own
computes prompts of 2,000 tokens, of which only the logits travel (computing); it hands the caches of such prompts
over, one right after the other (the whole system); a sender that computes nothing hands over such caches, layer by
layer and just as slowly (receiving); and the same beside a process that multiplies matrices and has nothing of this
project in it (beside). Each worker has one thread, and a core. Every turn starts its streams anew and waits until all
run, so all kinds see the same contexts, and takes another place among the five. A gap is the time between two messages
of one stream, as its reader sees them.

What computing costs over idle is the machine's: two cores that share memory, cache and clock. No way of handing a
cache over can avoid it, since prefill computes meanwhile whatever happens to its result. Receiving is what the decode
worker itself adds, and what it can be held to. Beside says what the whole system would cost if prefill were nothing
but its matrix products.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine import tiny_checkpoint
from benchmarks.paced import PacedSender
from benchmarks.pair import Pair, WorkerProcess, drive, random_prompt
from benchmarks.report import Figure, make_parser, report
from cache_transfer.wire import contract_from_proto
from decode_worker.settings import DecodeSettings
from pdserve.engine.load import find_smollm2
from pdserve.engine.plan import EngineConfig
from prefill_worker.settings import PrefillSettings

GOAL = 1.15
IDLE, COMPUTING, ARRIVING, RECEIVING, BESIDE = KINDS = ("idle", "computing", "arriving", "receiving", "beside")


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
    streams=8, stream_prompt=64, stream_output=1500, arriving=2000, pages=1280, turns=4, turn_s=8.0, vocab=49152
)
QUICK = Plan(streams=8, stream_prompt=8, stream_output=300, arriving=200, pages=256, turns=1, turn_s=1.5, vocab=512)


@dataclass
class Meter:
    """Gaps in seconds and prompts that were prefilled, by the kind of turn."""

    kind: str = IDLE
    gaps: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    prompts: Counter[str] = field(default_factory=Counter)
    handoffs: list[float] = field(default_factory=list)  # seconds that each took a real prefill worker

    def quantile_ms(self, kind: str, share: float) -> float:
        gaps = torch.tensor(self.gaps[kind], dtype=torch.float64)
        return 1000 * float(gaps.quantile(share))


async def stream(pair: Pair, plan: Plan, meter: Meter, seed: int, running: asyncio.Barrier) -> None:
    """Streams until it is cancelled; every gap, once all are running, goes to the meter's present turn."""
    for begun in itertools.count():
        last = 0.0
        prompt = random_prompt(plan.stream_prompt, seed + begun, plan.vocab)
        async for _ in pair.generate(prompt, plan.stream_output):
            now = time.perf_counter()
            if last:
                meter.gaps[meter.kind].append(now - last)
            elif not begun:
                await running.wait()
                now = time.perf_counter()
            last = now


async def prefill_prompts(pair: Pair, plan: Plan, meter: Meter) -> None:
    """Prompts that share no prefix, one after the other; one token needs no cache, two bring it."""
    tokens = 2 if meter.kind == ARRIVING else 1
    while True:
        began = time.perf_counter()
        prompt = random_prompt(plan.arriving, 10**6 + meter.prompts.total(), plan.vocab)
        async for _ in pair.generate(prompt, tokens):
            pass
        meter.prompts[meter.kind] += 1
        if meter.kind == ARRIVING:
            meter.handoffs.append(time.perf_counter() - began)


async def receive_caches(pair: Pair, plan: Plan, meter: Meter, sender: PacedSender) -> None:
    """As `prefill_prompts`, of the paced sender; the prefill worker does nothing."""
    while True:
        prompt = random_prompt(plan.arriving, 10**6 + meter.prompts.total(), plan.vocab)
        async for _ in pair.generate(prompt, 2, sender):
            pass
        meter.prompts[meter.kind] += 1


class Multiplier:
    """A process that multiplies matrices of a chunk's size on one thread, while it is told to."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.on = context.Event()
        self._process = context.Process(target=_multiply, args=(self.on,), daemon=True)
        self._process.start()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _multiply(on: Event) -> None:
    torch.set_num_threads(1)
    x, weights = torch.zeros(256, 576, dtype=torch.bfloat16), torch.zeros(576, 1536, dtype=torch.bfloat16)
    while on.wait():
        x @ weights


async def measure(plan: Plan, prefill: str, decode: str, multiplier: Multiplier) -> list[Figure]:
    meter = Meter()
    async with drive(prefill, decode) as pair:
        await pair.handoff(random_prompt(plan.arriving, 1, plan.vocab))  # warms both workers up
        began = time.perf_counter()
        await pair.handoff(random_prompt(plan.arriving, 2, plan.vocab))
        meter.handoffs.append(time.perf_counter() - began)
        sender = PacedSender(contract_from_proto(pair.contract), plan.arriving)
        for number in range(plan.turns):
            print(f"turn {number + 1} of {plan.turns}", file=sys.stderr, flush=True)
            for meter.kind in (*KINDS[number % 5 :], *KINDS[: number % 5]):  # each first once: contexts grow
                sender.seconds = median(meter.handoffs)
                streams = await started(pair, plan, meter, 1000 * (KINDS.index(meter.kind) + 4 * number))
                others = [asyncio.create_task(each) for each in beside(pair, plan, meter, sender)]
                if meter.kind == BESIDE:
                    multiplier.on.set()
                await turn([*others, *streams], plan.turn_s)
                multiplier.on.clear()
                await cancel([*others, *streams])
        await sender.close()
    return figures(plan, meter)


async def started(pair: Pair, plan: Plan, meter: Meter, seed: int) -> list[asyncio.Task[None]]:
    """New streams that all run."""
    running = asyncio.Barrier(plan.streams + 1)
    streams = [asyncio.create_task(stream(pair, plan, meter, seed + 100 * n, running)) for n in range(plan.streams)]
    starting = asyncio.create_task(running.wait())
    await asyncio.wait({starting, *streams}, return_when=asyncio.FIRST_COMPLETED)
    return streams


def beside(pair: Pair, plan: Plan, meter: Meter, sender: PacedSender) -> Sequence[Coroutine[None, None, None]]:
    """What happens beside the streams in a turn of the meter's kind."""
    match meter.kind:
        case "computing" | "arriving":
            return (prefill_prompts(pair, plan, meter),)
        case "receiving" | "beside":
            return (receive_caches(pair, plan, meter, sender),)
    return ()


def figures(plan: Plan, meter: Meter) -> list[Figure]:
    def latency(share: float, kind: str, peer: str, goal: float | None = None) -> Figure:
        doing = {
            COMPUTING: "are computed",
            ARRIVING: "are computed and arrive",
            RECEIVING: "arrive",
            BESIDE: "arrive and another process multiplies matrices",
        }[kind]
        name = (
            f"p{100 * share:g} inter-token latency of {plan.streams} streams while prompts of {plan.arriving} {doing}"
        )
        value, other = meter.quantile_ms(kind, share), meter.quantile_ms(peer, share)
        return Figure(f"{name}, over {peer}", value, "ms", other, goal, at_most=True)

    seconds = plan.turns * plan.turn_s
    return [
        latency(0.99, RECEIVING, IDLE, GOAL),
        latency(0.99, ARRIVING, IDLE, GOAL),
        latency(0.99, ARRIVING, COMPUTING),
        latency(0.99, COMPUTING, IDLE),
        latency(0.99, BESIDE, IDLE),
        latency(0.99, ARRIVING, BESIDE),
        latency(0.5, RECEIVING, IDLE),
        latency(0.5, ARRIVING, IDLE),
        latency(0.5, COMPUTING, IDLE),
        *(
            Figure(f"prompts per second: {kind}", meter.prompts[kind] / seconds, "/s")
            for kind in (RECEIVING, ARRIVING, COMPUTING)
        ),
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
    multiplier = Multiplier()
    workers = [WorkerProcess(path, PrefillSettings(engine=engine)), WorkerProcess(path, DecodeSettings(engine=engine))]
    try:
        prefill, decode = [worker.started() for worker in workers]
        return asyncio.run(measure(plan, prefill, decode, multiplier))
    finally:
        multiplier.stop()
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
