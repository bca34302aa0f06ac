"""Five times what a deployment can serve: who is refused, and what the others notice.

A prefill and a decode worker with one core each, the router and this load generator beside decode. Three tenants, no
prompt twice. The command finds the capacity by itself (callers ask again as soon as they are answered), then sends
requests at random times, none waiting for another:

    at capacity   as many as were served, a third from each tenant
    overload      five times as many: two tenants a fifth of the capacity each, the third one all the rest
    afterwards    the same without the third one

Half go by HTTP, half by gRPC. A request that would wait more than --max-wait-s for others is refused with the time to
come again (router.max_wait_s), and one tenant may fill a part of that time only. So is one that would wait so long for
a place among the --max-batch streams of a step (decode.max_batch). Times are of requests that were taken.
The exit status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.completions import Ask, Outcome, Target, stream
from benchmarks.overload_figures import FLOOD, OTHERS, TENANTS, TOO_MANY, Measured, figures_of
from benchmarks.report import make_parser, report
from benchmarks.soak_house import toml
from benchmarks.systems import System, on_cores, run_until_done, start_pdserve
from benchmarks.workloads import Phase, make_ask
from pdserve.client import AsyncClient, Tokens
from pdserve.errors import PdserveError
from pdserve.request import SamplingParams

TIMES = 5.0
LIGHT = 0.2  # of the capacity, from each of the others in the overload
KEYS = {name: f"{name}-key-of-the-overload" for name in TENANTS}


@dataclass(frozen=True)
class Sizes:
    """Of requests, in tokens: each prompt with each output is as likely."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    ids: range


@dataclass(frozen=True)
class Plan:
    """How long each part lasts, in seconds."""

    sizes: Sizes
    callers: int = 12
    find_s: float = 25.0
    settle_s: float = 8.0  # at the beginning of a part, not counted
    at_capacity_s: float = 60.0
    overload_s: float = 60.0
    after_s: float = 15.0


FULL = Plan(Sizes((64, 128, 256), (32, 64), range(1000, 40_000)))
QUICK = Plan(Sizes((100, 200), (8, 16), range(1, 500)), 8, 8.0, 3.0, 15.0, 15.0, 8.0)


@dataclass(frozen=True)
class Doors:
    """A tenant's ways in."""

    tenant: str
    http: Target
    grpc: AsyncClient

    async def send(self, ask: Ask, by_grpc: bool) -> Outcome:
        return await (by_client(self.grpc, ask) if by_grpc else stream(self.http, ask))


async def by_client(client: AsyncClient, ask: Ask) -> Outcome:
    """As `completions.stream`, through the Python client; a refusal's status is what HTTP would have said."""
    outcome = Outcome(ask, time.monotonic())
    sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
    try:
        async for event in client.generate(token_ids=ask.prompt, sampling=sampling):
            if isinstance(event, Tokens) and event.ids:
                outcome.arrivals.append((time.monotonic(), len(event.ids)))
    except PdserveError as error:
        outcome.error = f"{error.reason}: {error}"
        if not outcome.arrivals:
            outcome.status = TOO_MANY if error.retry_after_ms else 0
            outcome.retry_after_s = error.retry_after_ms / 1000
    return outcome


async def find_capacity(doors: Sequence[Doors], plan: Plan, seed: int) -> float:
    """Requests per second that are served while there are always some to serve."""
    drawn, began, ends = random.Random(seed), time.monotonic(), list[float]()
    until = began + plan.find_s

    async def caller(mine: Doors) -> None:
        while time.monotonic() < until:
            outcome = await mine.send(one_ask(mine.tenant, plan.sizes, drawn), drawn.random() < 0.5)
            if outcome.completed:
                ends.append(time.monotonic())
            else:
                await asyncio.sleep(0.05)  # refused: others are served meanwhile

    async with asyncio.TaskGroup() as group:
        for number in range(plan.callers):
            group.create_task(caller(doors[number % len(doors)]))
    counted = [at for at in ends if began + plan.settle_s <= at <= until]
    return len(counted) / (plan.find_s - plan.settle_s)


async def arrive(doors: Sequence[Doors], rates: Mapping[str, float], seconds: float, plan: Plan, seed: str) -> Phase:
    """Each tenant's requests at random times, `rates` per second; ends with the last answer."""
    began = time.monotonic()
    outcomes: list[Outcome] = []

    async def one(at: float, mine: Doors, ask: Ask, by_grpc: bool) -> None:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        outcomes.append(await mine.send(ask, by_grpc))

    async with asyncio.TaskGroup() as group:
        for mine in doors:
            drawn, at = random.Random(f"{seed} {mine.tenant}"), 0.0
            rate = rates.get(mine.tenant, 0.0)
            while rate and (at := at + drawn.expovariate(rate)) < seconds:
                ask = one_ask(mine.tenant, plan.sizes, drawn)
                group.create_task(one(began + at, mine, ask, drawn.random() < 0.5))
    return Phase(tuple(outcomes), began + min(plan.settle_s, seconds / 4), began + seconds)


def one_ask(tenant: str, sizes: Sizes, drawn: random.Random) -> Ask:
    return make_ask(tenant, (drawn.choice(sizes.prompts), drawn.choice(sizes.outputs)), drawn, sizes.ids)


async def measure(options: argparse.Namespace) -> Measured:
    first, *others = options.cores
    cores = {"prefill": others or [first], "decode": [first]}
    system = await start_pdserve("overload", config(options), cores)
    try:
        with on_cores([first]):
            async with doors_of(system) as doors:
                return await run(options, doors)
    finally:
        await system.processes.stop()


async def run(options: argparse.Namespace, doors: Sequence[Doors]) -> Measured:
    plan: Plan = options.plan
    capacity = await find_capacity(doors, plan, options.seed)
    say(f"capacity: {capacity:.2f} requests/s")
    thirds = dict.fromkeys(TENANTS, capacity / len(TENANTS))
    at_capacity = await arrive(doors, thirds, plan.at_capacity_s, plan, f"{options.seed} capacity")
    say(f"at capacity: {told(at_capacity)}")
    light = dict.fromkeys(OTHERS, LIGHT * capacity)
    flood = light | {FLOOD: (TIMES - LIGHT * len(OTHERS)) * capacity}
    began = time.monotonic()
    # What comes afterwards does not wait for the last answers of the flood.
    overload, after = await asyncio.gather(
        arrive(doors, flood, plan.overload_s, plan, f"{options.seed} overload"),
        later(plan.overload_s, doors, light, plan, f"{options.seed} after"),
    )
    say(f"overload: {told(overload)}")
    say(f"afterwards: {told(after)}")
    for outcome in (o for phase in (at_capacity, overload, after) for o in phase.failures if o.status != TOO_MANY):
        say(f"failed: {outcome.ask.kind} {outcome.error}")
    return Measured(capacity, at_capacity, replace(overload, end=began + plan.overload_s), after)


async def later(seconds: float, doors: Sequence[Doors], rates: Mapping[str, float], plan: Plan, seed: str) -> Phase:
    await asyncio.sleep(seconds)
    return await arrive(doors, rates, plan.after_s, plan, seed)


def told(phase: Phase) -> str:
    refused = sum(outcome.status == TOO_MANY for outcome in phase.outcomes)
    return f"{len(phase.outcomes)} requests, {refused} refused, {len(phase.failures) - refused} failed"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def doors_of(system: System) -> AsyncIterator[list[Doors]]:
    ready = system.processes.printed("router")
    address = ready.split("grpc ", 1)[1].split()[0]
    async with AsyncExitStack() as stack:
        yield [
            Doors(
                name,
                replace(system.targets[0], key=key),
                await stack.enter_async_context(AsyncClient(address, api_key=key)),
            )
            for name, key in KEYS.items()
        ]


def config(options: argparse.Namespace) -> str:
    engine: dict[str, object] = {"dtype": "bf16", "pages": 2000, "threads": 1}
    if options.quick:
        engine |= {"dtype": "fp32", "deterministic": True}  # slow enough for this load generator
    tables: dict[str, dict[str, object]] = {
        "model": {"path": str(options.model), "name": "smollm2"},
        "engine": engine,
        "router": {"max_wait_s": options.max_wait_s},
        "decode": {"max_batch": options.max_batch},
    }
    tenants = [f'[[router.tenants]]\nname = "{name}"\nkeys = ["{key}"]\n' for name, key in KEYS.items()]
    return toml(tables) + "\n".join(tenants)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="checkpoint (--quick: a small random one)")
    parser.add_argument("--max-wait-s", type=float, default=2.0, help="router.max_wait_s")
    parser.add_argument("--max-batch", type=int, default=8, help="decode.max_batch: what a step may cost streams")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.plan = QUICK if options.quick else FULL
    options.cores = sorted(os.sched_getaffinity(0))[:2]
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.model = tiny_checkpoint(Path(folder))
        figures = figures_of(run_until_done(measure(options)), options.quick)
    report(figures, options.json)
    sys.exit(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    main()
