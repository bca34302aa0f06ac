"""Bytes that a worker holds, and what a long prompt adds while it is handed over.

    tensors     storages of all live tensors, over weights and configured cache
    resident    what the process holds beyond weights and cache: interpreter, libraries, buffers
    long prompt how far the resident peak rises during its handoff, over the bytes of its cache; a second
                copy of the cache would add 1

The whole pool is touched before: pages that were never used would otherwise look like growth. The workers
are warmed up with short prompts only, so that no memory freed by an earlier long one can hide a copy.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import tiny_checkpoint
from benchmarks.pair import Memory, WorkerProcess, drive, random_prompt
from benchmarks.report import Figure, make_parser, report
from decode_worker.settings import DecodeSettings
from pdserve.engine.load import find_smollm2
from pdserve.engine.plan import EngineConfig
from prefill_worker.settings import PrefillSettings

MIB = 1 << 20
TENSOR_GOAL = 1.05  # rotary tables and masks beside weights and cache
RESIDENT_GOAL_MIB = 640.0  # Python, torch, gRPC, and what loading left in the heap
COPY_GOAL = 0.5  # chunks, frames in flight and socket buffers; never a whole cache


@dataclass(frozen=True)
class Plan:
    tokens: int  # of the long prompt
    short: int  # tokens of the prompts before it
    pages: int
    vocab: int


FULL = Plan(tokens=4000, short=64, pages=264, vocab=49152)
QUICK = Plan(tokens=500, short=32, pages=40, vocab=512)


async def measure(plan: Plan, workers: dict[str, WorkerProcess]) -> list[Figure]:
    addresses = {role: worker.started() for role, worker in workers.items()}
    figures: list[Figure] = []
    async with drive(addresses["prefill"], addresses["decode"]) as pair:
        print("warming up", file=sys.stderr, flush=True)
        for seed in range(4):
            await pair.handoff(random_prompt(plan.short, seed, plan.vocab))
        for worker in workers.values():
            worker.touch_cache()
        before = {role: worker.memory() for role, worker in workers.items()}
        for worker in workers.values():
            worker.reset_peak()
        print("measuring", file=sys.stderr, flush=True)
        await pair.handoff(random_prompt(plan.tokens, 7, plan.vocab))
        after = {role: worker.memory() for role, worker in workers.items()}
        for role in workers:
            figures += _figures(role, before[role], after[role], plan)
    return figures


def _figures(role: str, before: Memory, after: Memory, plan: Plan) -> list[Figure]:
    model = before.weights + before.cache
    growth = max(0, after.peak - before.resident)
    return [
        Figure(
            f"{role}: live tensors over weights and cache", before.tensors / MIB, "MiB", model / MIB, TENSOR_GOAL, True
        ),
        Figure(
            f"{role}: resident beyond weights and cache",
            (before.resident - model) / MIB,
            "MiB",
            goal=RESIDENT_GOAL_MIB,
            at_most=True,
        ),
        Figure(
            f"{role}: peak growth over the cache of a prompt of {plan.tokens} tokens",
            growth / MIB,
            "MiB",
            plan.tokens * before.token / MIB,
            COPY_GOAL,
            True,
        ),
    ]


def run(path: Path, plan: Plan) -> list[Figure]:
    engine = EngineConfig(dtype="bf16", pages=plan.pages, threads=1)
    workers = {
        "prefill": WorkerProcess(path, PrefillSettings(engine=engine)),
        "decode": WorkerProcess(path, DecodeSettings(engine=engine)),
    }
    try:
        return asyncio.run(measure(plan, workers))
    finally:
        for worker in workers.values():
            worker.stop()


def main() -> None:
    options = make_parser(__doc__).parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            # 16 KiB of cache per token, so that its size stands out from the heap's noise
            figures = run(tiny_checkpoint(Path(folder), layers=8, kv_heads=8, head_dim=64), QUICK)
    else:
        figures = run(find_smollm2(), FULL)
    report(figures, options.json)


if __name__ == "__main__":
    main()
