"""Poisson arrivals on ideal systems: what the ledger's bound leaves for goodput, whoever writes the program.

An ideal system computes prompts at the arithmetic peak of its cores. It knows each prompt's length, changes between
prompts at no cost, moves them between its workers at no cost, and gives out tokens at no cost at all. All that it
cannot do is compute one prompt on two workers at once. So it is better than any real system of its kind, and what is
compared is how the same cores are cut: into two workers with one core each, or one with both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Figure
from benchmarks.workloads import Poisson, arrivals

Order = Callable[["Prompt", float, float], tuple[float, float]]


@dataclass
class Prompt:
    """One request. Mutable: `left` shrinks, `ended` is set."""

    came: float  # seconds
    left: float  # core-seconds of arithmetic
    deadline: float
    ended: float = float("inf")


def shortest_first(prompt: Prompt, now: float, speed: float) -> tuple[float, float]:
    return prompt.left, prompt.came


def deadline_first(prompt: Prompt, now: float, speed: float) -> tuple[float, float]:
    """Whoever is too late already goes last."""
    late = now + prompt.left / speed > prompt.deadline
    return (float(late), prompt.deadline)


ORDERS: tuple[Order, ...] = (shortest_first, deadline_first)


def run(prompts: Sequence[Prompt], workers: int, speed: float, order: Order) -> None:
    """Computes all of them, on `workers` that each do `speed` core-seconds per second. Sets `left` and `ended`."""
    coming, here, now = sorted(prompts, key=lambda prompt: prompt.came), list[Prompt](), 0.0
    while coming or here:
        if not here:
            now = max(now, coming[0].came)
        while coming and coming[0].came <= now:
            here.append(coming.pop(0))
        chosen = sorted(here, key=lambda prompt: order(prompt, now, speed))[:workers]
        first_end = now + min(prompt.left for prompt in chosen) / speed
        then = min(first_end, coming[0].came) if coming else first_end
        for prompt in chosen:
            prompt.left -= (then - now) * speed
            if then == first_end and prompt.left < 1e-9:
                prompt.ended = then
                here.remove(prompt)
        now = then


def goodput(plans: Sequence[Poisson], work_s: Mapping[int, float], workers: int, speed: float) -> float:
    """Requests per second that meet the objective, by the better of both orders, over runs of the same rate.

    work_s: core-seconds of a prompt by its length in tokens.
    """
    return max(_goodput(plans, work_s, workers, speed, order) for order in ORDERS)


def _goodput(plans: Sequence[Poisson], work_s: Mapping[int, float], workers: int, speed: float, order: Order) -> float:
    met, seconds = 0, 0.0
    for plan in plans:
        prompts = [Prompt(at, work_s[len(ask.prompt)], at + plan.first_token_s) for at, ask in arrivals(plan)]
        run(prompts, workers, speed, order)
        met += sum(prompt.ended <= prompt.deadline for prompt in prompts)
        seconds += max(plan.seconds, *(prompt.ended for prompt in prompts))
    return met / seconds


def ideals(rates: Sequence[float], seeds: Sequence[int], work_s: Mapping[int, float], cores: int) -> list[Figure]:
    """Of each rate: workers with one core each, beside one worker with all cores."""
    figures = []
    for rate in rates:
        plans = [Poisson(rate, seed=seed) for seed in seeds]
        each, one = goodput(plans, work_s, cores, 1.0), goodput(plans, work_s, 1, float(cores))
        name = f"bound: {rate:g}/s: goodput of {cores} ideal workers with one core each, against one with {cores}"
        figures.append(Figure(name, each, "requests/s", one))
    return figures
