"""What a worker learns of its own speed, from steps whose cost is a formula we chose."""

from __future__ import annotations

import random

import pytest

from pdserve.engine.rate import TOLD_S, StepCost, pairs


def true_s(spans: list[tuple[int, int]]) -> float:
    """Seconds of a made-up machine."""
    return 0.04 + sum(0.0014 * count + 5e-7 * pairs(start, count) for start, count in spans)


def test_pairs_are_counted_one_by_one() -> None:
    assert pairs(5, 3) == 6 + 7 + 8


def test_nothing_is_known_before_the_first_step() -> None:
    cost = StepCost()
    assert not cost.known
    assert (cost.predict([(0, 256)]), cost.tokens_per_s(256), cost.prompt_s(1000, 0, 256)) == (0.0, 0.0, 0.0)


def test_one_step_gives_a_rate() -> None:
    cost = StepCost()
    cost.observe([(0, 100)], 0.5)
    assert cost.tokens_per_s(100) == pytest.approx(200)
    assert cost.predict([(0, 300)]) == pytest.approx(1.5)


def test_the_costs_of_a_step_a_token_and_a_pair_are_told_apart() -> None:
    cost, rng = StepCost(), random.Random(1)
    for _ in range(300):
        spans = [(rng.randrange(0, 4096), rng.choice((16, 64, 128, 256))) for _ in range(rng.randint(1, 3))]
        cost.observe(spans, true_s(spans))
    assert cost.fixed_s == pytest.approx(0.04, rel=0.05)
    assert cost.token_s == pytest.approx(0.0014, rel=0.05)
    assert cost.pair_s == pytest.approx(5e-7, rel=0.05)
    whole = sum(true_s([(start, 256)]) for start in range(0, 4096, 256))
    assert cost.prompt_s(4096, 0, 256) == pytest.approx(whole, rel=0.02)


def test_equal_steps_are_predicted_though_their_terms_cannot_be_told_apart() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe([(0, 256)], true_s([(0, 256)]))
    assert cost.predict([(0, 256)]) == pytest.approx(true_s([(0, 256)]), rel=0.01)
    assert cost.fixed_s >= 0 and cost.token_s >= 0 and cost.pair_s >= 0


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    cost = StepCost()
    for _ in range(100):
        for start in (0, 256, 512, 768):
            cost.observe([(start, 256)], true_s([(start, 256)]))
    for _ in range(25):
        for start in (0, 256, 512, 768):
            cost.observe([(start, 256)], 3 * true_s([(start, 256)]))
    assert cost.prompt_s(1024, 0, 256) == pytest.approx(
        3 * sum(true_s([(s, 256)]) for s in (0, 256, 512, 768)), rel=0.1
    )


def test_what_others_are_told_of_prompts_outlives_many_short_steps() -> None:
    told, rng = StepCost(TOLD_S), random.Random(2)
    for start in range(0, 2048, 256):
        told.observe([(start, 256)], true_s([(start, 256)]))
    for n in range(300):  # five seconds of streams and no prompt, not quite as regular as the formula
        spans = [(100 + n, 1)] * 3
        told.observe(spans, 0.4 * true_s(spans) * rng.uniform(0.95, 1.05))
    whole = sum(true_s([(start, 256)]) for start in range(0, 2048, 256))
    assert told.prompt_s(2048, 0, 256) == pytest.approx(whole, rel=0.25)
