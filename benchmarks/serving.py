"""Serving under load, against vLLM: two seeded workloads over HTTP, all systems on the same two cores.

    a    pdserve disaggregated, placement `auto`: a prefill and a decode worker with one core and one thread each
    b    pdserve in one process: a decode worker with two threads that computes its prompts itself
    c    vLLM, one server, two threads;   c256: the same with a budget of 256 tokens a step
    d    vLLM's own disaggregation over NIXL: two servers with one thread each

Interference: six steady streams (64 tokens in, 192 out, one request after the other), first alone, then while a
prompt of 1,800 tokens arrives every four seconds. Poisson: requests of 128, 512 or 1,536 tokens in and 32 or 96
out at random times. Goodput counts the requests whose time to first token is within 2.5 s and whose mean time
between tokens is within 100 ms.

Routers and this load generator run on the same two cores; beside a they have those of its decode worker. Systems run
one after the other. An hour is long: with --keep FOLDER each run is kept, and the figures are of all runs in it, so
that --only, --systems, --rates and --seeds can cut one measurement into parts. Goals are of system a, and need the
systems that they name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.report import Figure, make_parser, report
from benchmarks.serving_bounds import bounds
from benchmarks.serving_figures import LABELS, figures_of
from benchmarks.serving_runs import Run, keep, kept
from benchmarks.systems import NotAvailable, System, on_cores, run_until_done, start_pdserve, start_vllm
from benchmarks.workloads import IDS, Interference, Phase, Poisson, arrive, interfere, make_ask

QUICK_IDS = range(1, 500)
RATES = (0.3, 0.6, 1.0)
SEEDS = (1, 2, 3)
SECTIONS = ("engine", "router", "decode", "prefill")

TUNED: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("a", "interference"): {"decode.step_ms": "42"},
    ("a", "poisson"): {
        "decode.step_ms": "80",
        "decode.first_token_s": "2.5",
        "prefill.first_token_s": "2.4",
        "prefill.chunk_tokens": "768",
        "prefill.step_ms": "1200",
    },
    ("b", "interference"): {"decode.step_ms": "90", "decode.chunk_tokens": "512"},
    ("b", "poisson"): {"decode.step_ms": "90", "decode.chunk_tokens": "512", "decode.first_token_s": "2.5"},
}
"""What our two systems are told besides the defaults: the longest step that streams wait for, found by trying
(docs/performance-log.md); for a by the goal of each workload, for b by its goodput. Both know the objective for first
tokens; a's prefill worker leaves a tenth of a second to the transfer and the decode worker's step."""


def settings(options: argparse.Namespace, system: str, workload: str) -> dict[str, str]:
    """section.key -> value in TOML; --engine and its like go before what was tuned."""
    made = dict(TUNED.get((system, workload), {}))
    for section in SECTIONS:
        pairs = (pair.split("=", 1) for pair in getattr(options, section).split(",") if pair)
        made.update((f"{section}.{name.strip()}", value.strip()) for name, value in pairs)
    return made


def config(model: str, threads: int, placement: str, more: Mapping[str, str]) -> str:
    """A pdserve.toml. A page pool of 2 GiB, as vLLM has here."""
    sections = {
        "model": {"path": f'"{model}"', "name": '"smollm2"'},
        "engine": {"dtype": '"bf16"', "pages": "5600", "threads": str(threads)},
        "router": {"disaggregate": f'"{placement}"'},
        "decode": {},
        "prefill": {},
    }
    for name, value in more.items():
        section, key = name.split(".", 1)
        sections[section][key] = value
    lines = [[f"[{name}]", *(f"{key} = {value}" for key, value in keys.items())] for name, keys in sections.items()]
    return "\n".join(line for section in lines for line in section) + "\n"


def starter(options: argparse.Namespace, name: str, workload: str) -> Callable[[], Awaitable[System]]:
    more = settings(options, name, workload)
    first, *others = options.cores
    one_each = {"prefill": others or [first], "decode": [first]}
    return {
        "a": partial(start_pdserve, "a", config(options.model, 1, options.placement, more), one_each),
        "b": partial(start_pdserve, "b", config(options.model, len(options.cores), "never", more),
                     {"decode": options.cores}),
        "c": partial(start_vllm, "c", [], len(options.cores)),
        "c256": partial(start_vllm, "c256", ["--max-num-batched-tokens", 256], len(options.cores)),
        "d": partial(start_vllm, "d", [], 1, disaggregated=True),
    }[name]  # fmt: skip


@asynccontextmanager
async def serving(options: argparse.Namespace, name: str, workload: str) -> AsyncIterator[System]:
    """The system, ready and warm; raises NotAvailable. This process shares the cores of a's decode worker."""
    began = time.monotonic()
    system = await starter(options, name, workload)()
    try:
        with on_cores(options.cores[:1] if name == "a" else options.cores):
            await warm_up(system, options.quick)
            print(f"{LABELS[name]}: ready and warm after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            yield system
    finally:
        await system.processes.stop()


async def warm_up(system: System, quick: bool) -> None:
    """Each kind of request, alone and together: compiles and allocates what the first ones would."""
    seeded, ids = random.Random(0), QUICK_IDS if quick else IDS
    for sizes in ((64, 8),) if quick else ((64, 8), (1800, 4), (512, 8)):
        outcome = await system.send(make_ask("warm", sizes, seeded, ids))
        if not outcome.completed:
            print(f"warm-up: {outcome.error}", file=sys.stderr)
    await asyncio.gather(*(system.send(make_ask("warm", (64, 24), seeded, ids)) for _ in range(6)))


async def watched(system: System, work: Awaitable[tuple[Phase, ...]]) -> tuple[tuple[Phase, ...], dict[str, float]]:
    """The phases, and the processor time that each process and this one took, in cores."""
    before, own, began = system.processes.cpu_seconds(), time.process_time(), time.monotonic()
    phases = await work
    wall = time.monotonic() - began
    cores = {name: (at - before[name]) / wall for name, at in system.processes.cpu_seconds().items()}
    cores["load generator"] = (time.process_time() - own) / wall
    told = ", ".join(f"{name} {share:.2f}" for name, share in cores.items())
    print(f"{LABELS[system.name]}: processor time in cores: {told}", file=sys.stderr, flush=True)
    system.processes.check()
    for outcome in phases[-1].failures[:3]:
        print(f"{LABELS[system.name]}: a {outcome.ask.kind} request failed: {outcome.error}", file=sys.stderr)
    return phases, cores


async def interference(options: argparse.Namespace, system: System) -> AsyncIterator[Run]:
    plan = Interference(seed=options.seed)
    if options.quick:
        plan = Interference(2.0, 1.0, 2, steady=(16, 16), long=(200, 4), every_s=1.0, ids=QUICK_IDS)
    phases, cores = await watched(system, interfere(system.send, plan))
    yield Run("interference", system.name, plan.seed, phases, cores=cores)


async def poisson(options: argparse.Namespace, system: System) -> AsyncIterator[Run]:
    plans = [Poisson(rate, options.seconds, seed) for rate in options.rates for seed in options.seeds]
    if options.quick:
        plans = [Poisson(2.0, 2.0, 1, (32, 64), (4, 8), ids=QUICK_IDS)]

    async def run(plan: Poisson) -> tuple[Phase, ...]:
        return (await arrive(system.send, plan),)

    for plan in plans:
        phases, cores = await watched(system, run(plan))
        yield Run("poisson", system.name, plan.seed, phases, plan.rate, cores)


WORKLOADS = {"interference": interference, "poisson": poisson}


async def measure(options: argparse.Namespace) -> list[Run]:
    """Every system under every workload; those that cannot be had are left out, with the reason."""
    runs = []
    for workload in [options.only] if options.only else WORKLOADS:
        for name in options.systems:
            told = ", ".join(f"{key} = {value}" for key, value in settings(options, name, workload).items())
            try:
                async with serving(options, name, workload) as system:
                    async for run in WORKLOADS[workload](options, system):
                        run = replace(run, settings=told if name in ("a", "b") else "")
                        runs.append(run)
                        if options.keep:
                            keep(options.keep, run)
            except NotAvailable as error:
                print(f"{LABELS[name]}: {error}", file=sys.stderr)
    return runs


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = ", ".join(LABELS)
    parser.add_argument("--only", choices=WORKLOADS, help="one workload (default: both; --quick: interference)")
    parser.add_argument("--systems", type=_listed, metavar="NAMES", help=f"of: {names}, or none; --quick: a")
    parser.add_argument("--rates", type=_numbers(float), default=RATES, help="of Poisson runs, per second")
    parser.add_argument("--seeds", type=_numbers(int), default=SEEDS, help="one Poisson run at each rate for each")
    parser.add_argument("--seed", type=int, default=1, help="of the interference workload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one Poisson run")
    parser.add_argument("--model", default="smollm2", help="checkpoint that pdserve serves")
    parser.add_argument("--placement", choices=("always", "auto"), help="of system a (default: auto; --quick: always)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep each run here, report all that are here")
    for section in SECTIONS:
        parser.add_argument(f"--{section}", default="", metavar="KEY=VALUE,...", help=f"more keys of [{section}]")
    options = parser.parse_args()
    if options.systems is None:
        options.systems = ["a"] if options.quick else list(LABELS)
    options.placement = options.placement or ("always" if options.quick else "auto")
    options.only = options.only or ("interference" if options.quick else None)
    options.cores = sorted(os.sched_getaffinity(0))[:2]
    return options


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _listed(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    unknown = set(names) - LABELS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"no such system: {', '.join(sorted(unknown))}")
    return names


def made(options: argparse.Namespace) -> list[Figure]:
    os.sched_setaffinity(0, options.cores)
    runs: Sequence[Run] = run_until_done(measure(options))
    figures = figures_of(kept(options.keep) if options.keep else runs)
    return figures if options.quick else figures + bounds(options.model, RATES, SEEDS, len(options.cores))


def main() -> None:
    options = parse()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.model = tiny_checkpoint(Path(folder))
            figures = made(options)
    else:
        figures = made(options)
    report(figures, options.json)


if __name__ == "__main__":
    main()
