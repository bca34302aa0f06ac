"""A step whose layers run some at a time, with other steps between them: the same as one that runs at once."""

from __future__ import annotations

import random

import pytest
import torch

from pdserve.engine.checks import check_written
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.errors import InvalidRequest
from tests.engine.test_last_layer import MODELS
from tests.engine.tiny import prompt, run, spec, tiny_engine

WAYS = [*(("plain", name) for name in MODELS), ("native", "plain llama"), ("native", "windows")]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kernels", "name"), WAYS)
def test_layers_with_other_steps_between_them_give_the_same_bits(kernels: str, name: str, seed: int) -> None:
    of, rng = spec(**MODELS[name]), random.Random(seed)
    engine, whole = (tiny_engine(of, kernels=kernels, pages=200) for _ in range(2))
    ids, pages = prompt(90, seed=seed), tuple(range(30, 60))
    other = Chunk("b", prompt(20, seed=9), 0, tuple(range(10)))
    for each in (engine, whole):
        run(each, Chunk("a", ids[:40], 0, pages))
        run(each, other)
    plan = StepPlan((Chunk("a", ids[40:], 40, pages),))
    begun = engine.begin(plan)
    expected = whole.step(plan)
    tokens = 20
    while begun.done < of.layers:
        begun.advance(rng.randint(begun.done + 1, of.layers))
        # Larger than the suspended one, and in its way if anything is shared.
        for each in (engine, whole):
            run(each, Chunk("c", prompt(150, seed=tokens), 0, tuple(range(100, 140))))
        step = Chunk("b", (tokens,), tokens, tuple(range(10)))
        assert torch.equal(run(engine, step).logits["b"], run(whole, step).logits["b"])
        tokens += 1
    found = begun.output()
    check_written(plan, found)
    assert torch.equal(found.logits["a"], expected.logits["a"])
    assert (found.counters, found.written) == (expected.counters, expected.written)
    assert torch.equal(engine.cache.storage, whole.cache.storage)


def test_a_plan_that_cannot_run_is_refused_before_any_layer() -> None:
    with pytest.raises(InvalidRequest, match="cannot hold"):
        tiny_engine().begin(StepPlan((Chunk("a", prompt(20), 0, (1, 2)),)))
