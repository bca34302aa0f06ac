"""The two workloads of `benchmarks.serving`, seeded, and what is counted of them.

Interference: steady streams, each with one request after the other (closed loop), while long prompts arrive at
fixed times (open loop). Poisson: requests of mixed sizes at random times, none waiting for another.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.completions import Ask, Outcome, percentile

Send = Callable[[Ask], Awaitable[Outcome]]

IDS = range(1000, 40_000)  # of random prompts: ordinary tokens, and no two prompts share a prefix


@dataclass(frozen=True)
class Interference:
    seconds: float = 60.0
    idle_s: float = 12.0  # before the first long prompt
    streams: int = 6
    steady: tuple[int, int] = (64, 192)  # tokens of prompt and output
    long: tuple[int, int] = (1800, 4)
    every_s: float = 4.0
    seed: int = 1
    ids: range = IDS


@dataclass(frozen=True)
class Poisson:
    rate: float  # requests per second
    seconds: float = 60.0
    seed: int = 1
    prompts: tuple[int, ...] = (128, 512, 1536)
    outputs: tuple[int, ...] = (32, 96)
    first_token_s: float = 2.5  # the objective of a request: its time to first token
    mean_gap_s: float = 0.1  # and its mean time between tokens
    ids: range = IDS


@dataclass(frozen=True)
class Phase:
    """Outcomes and the stretch of time that is counted, on the monotonic clock."""

    outcomes: tuple[Outcome, ...]
    begin: float
    end: float

    def gaps(self, kind: str) -> list[float]:
        """Seconds between events that ended within the phase."""
        found = [gap for outcome in self.of(kind) for gap in outcome.gaps]
        return [seconds for at, seconds in found if self.begin <= at <= self.end]

    def first_tokens(self, kind: str = "") -> list[float]:
        """Times to first token of the requests that were sent within the phase and got one."""
        return [outcome.first_token_s for outcome in self.of(kind) if outcome.arrivals and self._sent_within(outcome)]

    @property
    def tokens_per_s(self) -> float:
        arrived = (pair for outcome in self.outcomes for pair in outcome.arrivals)
        return sum(count for at, count in arrived if self.begin <= at <= self.end) / (self.end - self.begin)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.completed]

    def of(self, kind: str = "") -> list[Outcome]:
        return [outcome for outcome in self.outcomes if kind in ("", outcome.ask.kind)]

    def _sent_within(self, outcome: Outcome) -> bool:
        return self.begin <= outcome.sent <= self.end


async def interfere(send: Send, plan: Interference) -> tuple[Phase, Phase]:
    """The streams alone for `idle_s`, then with long prompts for `seconds`. Every request is waited for."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    busy = began + plan.idle_s
    end = busy + plan.seconds

    async def steady(number: int) -> None:
        seeded = random.Random(plan.seed * 1000 + number)
        await asyncio.sleep(seeded.uniform(0, min(2.0, plan.idle_s / 4)))
        while time.monotonic() < end:
            outcomes.append(await send(make_ask("steady", plan.steady, seeded, plan.ids)))

    async def long(at: float, number: int) -> None:
        ask = make_ask("long", plan.long, random.Random(plan.seed * 1000 + 500 + number), plan.ids)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        outcomes.append(await send(ask))

    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.streams):
            tasks.create_task(steady(number))
        for number in range(int(plan.seconds / plan.every_s)):
            tasks.create_task(long(busy + number * plan.every_s, number))
    settled = began + plan.idle_s / 4
    return Phase(tuple(outcomes), settled, busy), Phase(tuple(outcomes), busy, end)


def arrivals(plan: Poisson) -> list[tuple[float, Ask]]:
    """Requests and the seconds from the beginning at which they come."""
    seeded = random.Random(f"{plan.seed} {plan.rate}")
    at, asks = 0.0, []
    while (at := at + seeded.expovariate(plan.rate)) < plan.seconds:
        sizes = seeded.choice(plan.prompts), seeded.choice(plan.outputs)
        asks.append((at, make_ask("poisson", sizes, seeded, plan.ids)))
    return asks


async def arrive(send: Send, plan: Poisson) -> Phase:
    """Every request of the plan, sent at its time; ends with the last token."""
    began = time.monotonic()
    asks = [(began + at, ask) for at, ask in arrivals(plan)]

    async def one(at: float, ask: Ask) -> Outcome:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        return await send(ask)

    outcomes = await asyncio.gather(*(one(at, ask) for at, ask in asks))
    last = max((outcome.arrivals[-1][0] for outcome in outcomes if outcome.arrivals), default=began)
    return Phase(tuple(outcomes), began, max(began + plan.seconds, last))


def make_ask(kind: str, sizes: tuple[int, int], seeded: random.Random, ids: range = IDS) -> Ask:
    prompt, output = sizes
    return Ask(kind, tuple(seeded.choice(ids) for _ in range(prompt)), output)


def goodput(phases: Sequence[Phase], plan: Poisson) -> float:
    """Requests per second that met both objectives, over runs of the same plan with other seeds."""
    met = sum(meets(outcome, plan) for phase in phases for outcome in phase.outcomes)
    return met / sum(phase.end - phase.begin for phase in phases)


def meets(outcome: Outcome, plan: Poisson) -> bool:
    return outcome.completed and outcome.first_token_s <= plan.first_token_s and outcome.mean_gap_s <= plan.mean_gap_s


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max; empty without values."""
    if not values:
        return {}
    return {**{f"p{share}": percentile(values, share / 100) for share in (50, 95, 99)}, "max": max(values)}
