"""Serving under load, against vLLM: two seeded workloads over HTTP, all systems on the same two cores.

    a    pdserve disaggregated: one prefill and one decode worker, one thread each (Poisson: placement `auto`)
    b    pdserve in one process: a decode worker with two threads that computes its prompts itself
    c    vLLM, one server, two threads;   c256: the same with a budget of 256 tokens a step
    d    vLLM's own disaggregation over NIXL: two servers with one thread each

Interference: six steady streams (64 tokens in, 192 out, one request after the other), first alone, then while a
prompt of 1,800 tokens arrives every four seconds. Poisson: requests of 128, 512 or 1,536 tokens in and 32 or 96
out at random times. Goodput counts the requests whose time to first token is within 2.5 s and whose mean time
between tokens is within 100 ms.

Routers and this load generator run on the same cores. Systems run one after the other: choose with --systems and
--only what shall be compared in one call. Goals are of system a, and need the systems that they name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.report import Figure, make_parser, report
from benchmarks.serving_goals import interference_goals, poisson_goals
from benchmarks.systems import NotAvailable, System, run_until_done, start_pdserve, start_vllm
from benchmarks.workloads import IDS, Interference, Phase, Poisson, arrive, goodput, interfere, make_ask, spread

CORES = 2
QUICK_IDS = range(1, 500)
RATES = (0.3, 0.6, 1.0)
LABELS = {
    "a": "pdserve, disaggregated",
    "b": "pdserve, one process",
    "c": "vLLM, one server",
    "c256": "vLLM, one server, 256-token budget",
    "d": "vLLM P/D over NIXL",
}

ENGINE = """
[model]
path = "{model}"
name = "smollm2"
[engine]
dtype = "bf16"
pages = 5600
threads = {threads}
{engine}
[router]
disaggregate = "{placement}"
{router}
[decode]
{decode}
[prefill]
{prefill}
"""


def config(options: argparse.Namespace, threads: int, placement: str) -> str:
    """A pdserve.toml. A page pool of 2 GiB, as vLLM has here."""
    extra = {
        section: getattr(options, section).replace(",", "\n") for section in ("engine", "router", "decode", "prefill")
    }
    return ENGINE.format(model=options.model, threads=threads, placement=placement, **extra)


def starters(options: argparse.Namespace, workload: str) -> Mapping[str, Callable[[], Awaitable[System]]]:
    placement = options.placement or ("auto" if workload == "poisson" else "always")
    return {
        "a": partial(start_pdserve, "a", config(options, 1, placement), prefill=True),
        "b": partial(start_pdserve, "b", config(options, CORES, "never"), prefill=False),
        "c": partial(start_vllm, "c", [], CORES),
        "c256": partial(start_vllm, "c256", ["--max-num-batched-tokens", 256], CORES),
        "d": partial(start_vllm, "d", [], 1, disaggregated=True),
    }


Phases = dict[str, tuple[Phase, ...]]


async def load(
    options: argparse.Namespace, workload: str, run: Callable[[System], Awaitable[tuple[Phase, ...]]]
) -> Phases:
    """Runs the workload on each system in turn; those that cannot be had are left out, with the reason."""
    found: Phases = {}
    for name in options.systems:
        began = time.monotonic()
        try:
            system = await starters(options, workload)[name]()
        except NotAvailable as error:
            print(f"{LABELS[name]}: {error}", file=sys.stderr)
            continue
        try:
            await warm_up(system, options.quick)
            print(f"{LABELS[name]}: ready and warm after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            found[name] = await watched(system, run)
        finally:
            await system.processes.stop()
    return found


async def warm_up(system: System, quick: bool) -> None:
    """Each kind of request, alone and together: compiles and allocates what the first ones would."""
    seeded, ids = random.Random(0), QUICK_IDS if quick else IDS
    for sizes in ((64, 8),) if quick else ((64, 8), (1800, 4), (512, 8)):
        outcome = await system.send(make_ask("warm", sizes, seeded, ids))
        if not outcome.completed:
            print(f"warm-up: {outcome.error}", file=sys.stderr)
    await asyncio.gather(*(system.send(make_ask("warm", (64, 24), seeded, ids)) for _ in range(6)))


async def watched(system: System, run: Callable[[System], Awaitable[tuple[Phase, ...]]]) -> tuple[Phase, ...]:
    """Runs it, and says what processor time each process and this one took."""
    before, own, began = system.processes.cpu_seconds(), time.process_time(), time.monotonic()
    phases = await run(system)
    wall = time.monotonic() - began
    shares = {name: (at - before[name]) / wall for name, at in system.processes.cpu_seconds().items()}
    shares["load generator"] = (time.process_time() - own) / wall
    told = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    print(f"{LABELS[system.name]}: processor time in cores: {told}", file=sys.stderr, flush=True)
    system.processes.check()
    for outcome in [outcome for phase in phases[-1:] for outcome in phase.failures][:3]:
        print(f"{LABELS[system.name]}: a {outcome.ask.kind} request failed: {outcome.error}", file=sys.stderr)
    return phases


async def interference(options: argparse.Namespace) -> list[Figure]:
    plan = Interference(seed=options.seed)
    if options.quick:
        plan = Interference(2.0, 1.0, 2, steady=(16, 16), long=(200, 4), every_s=1.0, ids=QUICK_IDS)
    found = await load(options, "interference", lambda system: interfere(system.send, plan))
    figures = []
    for name, (idle, busy) in found.items():
        figures += told(f"interference, {LABELS[name]}", busy, "steady")
        figures += told(f"interference, {LABELS[name]}, long prompts", busy, "long", gaps=False)
        alone = spread(idle.gaps("steady"))
        if alone:
            title = f"interference, {LABELS[name]}: inter-token p99 before the long prompts"
            figures.append(Figure(title, 1000 * alone["p99"], "ms"))
        figures.append(Figure(f"interference, {LABELS[name]}: tokens per second", busy.tokens_per_s, "tokens/s"))
        figures.append(Figure(f"interference, {LABELS[name]}: failed requests", len(busy.failures), "requests"))
    return figures + interference_goals(found)


def told(title: str, phase: Phase, kind: str, gaps: bool = True) -> list[Figure]:
    """Percentiles of the time to first token and of the time between tokens."""
    figures = [Figure(f"{title}: TTFT {name}", value, "s") for name, value in spread(phase.first_tokens(kind)).items()]
    if gaps:
        found = spread(phase.gaps(kind)).items()
        figures += [Figure(f"{title}: inter-token {name}", 1000 * value, "ms") for name, value in found]
    return figures


async def poisson(options: argparse.Namespace) -> list[Figure]:
    plans = [[Poisson(rate, options.seconds, seed) for seed in range(1, options.seeds + 1)] for rate in options.rates]
    if options.quick:
        plans = [[Poisson(2.0, 2.0, 1, (32, 64), (4, 8), ids=QUICK_IDS)]]

    async def run(system: System) -> tuple[Phase, ...]:
        return tuple([await arrive(system.send, plan) for same in plans for plan in same])

    found = await load(options, "poisson", run)
    figures: list[Figure] = []
    rated: dict[float, dict[str, float]] = {}
    for name, phases in found.items():
        left = iter(phases)
        for same in plans:
            own = [next(left) for _ in same]
            title = f"Poisson {same[0].rate:g}/s, {LABELS[name]}"
            rated.setdefault(same[0].rate, {})[name] = goodput(own, same[0])
            merged = Phase(tuple(o for phase in own for o in phase.outcomes), own[0].begin, own[-1].end)
            figures += told(title, merged, "poisson")
            figures.append(Figure(f"{title}: failed requests", len(merged.failures), "requests"))
    return figures + poisson_goals(rated, LABELS)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = ", ".join(LABELS)
    parser.add_argument(
        "--only", choices=("interference", "poisson"), help="one workload (default: both; --quick: interference)"
    )
    parser.add_argument("--systems", type=_listed, metavar="NAMES", help=f"of: {names}; --quick: a")
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=RATES)
    parser.add_argument("--seeds", type=int, default=3, help="Poisson runs at each rate")
    parser.add_argument("--seed", type=int, default=1, help="of the interference workload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one Poisson run")
    parser.add_argument("--model", default="smollm2", help="checkpoint that pdserve serves")
    parser.add_argument("--placement", choices=("always", "auto"), help="of system a, if not the workload's own")
    for section in ("engine", "router", "prefill", "decode"):
        parser.add_argument(f"--{section}", default="", metavar="KEY=VALUE,...", help=f"more keys of [{section}]")
    options = parser.parse_args()
    options.systems = options.systems or (["a"] if options.quick else list(LABELS))
    options.only = options.only or ("interference" if options.quick else None)
    return options


def _listed(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - LABELS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"no such system: {', '.join(sorted(unknown))}")
    return names


async def measure(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for name, workload in (("interference", interference), ("poisson", poisson)):
        if options.only in (None, name):
            figures += await workload(options)
    return figures


def main() -> None:
    options = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.model = tiny_checkpoint(Path(folder))
            figures = run_until_done(measure(options))
    else:
        figures = run_until_done(measure(options))
    report(figures, options.json)


if __name__ == "__main__":
    main()
