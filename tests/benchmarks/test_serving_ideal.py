"""Ideal systems under arrivals that can be worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.serving_ideal import Order, Prompt, deadline_first, run, shortest_first
from benchmarks.workloads import Poisson, arrivals


def ended(workers: int, speed: float, order: Order = shortest_first) -> list[float]:
    """Two long prompts at once, a short one a second later."""
    prompts = [Prompt(0.0, 4.0, 4.5), Prompt(0.0, 4.0, 9.0), Prompt(1.0, 1.0, 9.0)]
    run(prompts, workers, speed, order)
    return [prompt.ended for prompt in prompts]


def test_two_workers_with_one_core_each_and_one_with_two() -> None:
    assert ended(2, 1.0) == [4.0, 5.0, 2.0]  # the short one takes a worker from one of the long ones
    assert ended(1, 2.0) == [2.5, 4.5, 1.5]


def test_an_objective_goes_before_a_short_prompt_until_it_is_missed() -> None:
    assert ended(1, 1.0) == [5.0, 9.0, 2.0]
    assert ended(1, 1.0, deadline_first) == [4.0, 8.0, 9.0]


def test_the_same_requests_come_as_in_a_run() -> None:
    plan = Poisson(2.0, seconds=10.0, seed=3)
    first = arrivals(plan)
    assert first == arrivals(plan) and all(0 < at < 10 for at, _ in first)
    assert {len(ask.prompt) for _, ask in first} <= set(plan.prompts)
    assert len(first) == pytest.approx(20, abs=14)
