"""The last layer is computed for the rows whose logits are asked for: against a step that traces, and so computes, all
rows, and against a decoder written apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.engine.checks import TOLERANCES, check_written, relative_error
from pdserve.engine.plan import Chunk, LogitsWanted, StepPlan
from pdserve.engine.trace import StepTrace
from pdserve.errors import Cancelled
from tests.engine import oracle
from tests.engine.test_layer_shapes import CONVOLUTIONS, NONE, UNLIKE
from tests.engine.tiny import prompt, run, spec, tiny_engine, tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "plain llama": {},
    "windows": {"sliding_window": (0, 0, 5), "soft_cap": 2.0},
    "the last layer is a convolution": CONVOLUTIONS,
    "layers of several shapes": UNLIKE,
    "the last layer is an MLP": {"layers": 5, "layer_shapes": (*UNLIKE["layer_shapes"][:4], NONE)},
}
HELD = {"none": 5, "last": 0, "all": 3, "last again": 9, "one": 30, "one without": 4, "long ago": 70}
IDS = {"none": 25, "last": 40, "all": 18, "last again": 17, "one": 1, "one without": 1, "long ago": 1}
WANTED: dict[str, LogitsWanted] = {"none": "none", "all": "all", "one without": "none"}
PAGES = {key: tuple(range(number * 24, number * 24 + 24))[::-1] for number, key in enumerate(IDS)}


def plan(wanted: dict[str, LogitsWanted]) -> StepPlan:
    """Chunks of several tokens and of one, after others of their sequence or not."""
    ids = {key: prompt(HELD[key] + tokens, seed=tokens)[HELD[key] :] for key, tokens in IDS.items()}
    return StepPlan(tuple(Chunk(key, ids[key], HELD[key], PAGES[key], wanted.get(key, "last")) for key in IDS))


@pytest.mark.parametrize("way", ["at once", "announced"])
@pytest.mark.parametrize(
    ("kernels", "name"), [*(("plain", name) for name in MODELS), ("native", "plain llama"), ("native", "windows")]
)
def test_the_rows_that_are_wanted_are_those_of_a_step_that_computes_all(kernels: str, name: str, way: str) -> None:
    of = spec(**MODELS[name])
    engine, whole = (tiny_engine(of, kernels=kernels, pages=200) for _ in range(2))
    nothing: dict[str, LogitsWanted] = dict.fromkeys(IDS, "none")
    for number, wanted in enumerate((WANTED, nothing)):
        told: list[int] = []
        for each in (engine, whole):
            for key, tokens in HELD.items():
                if tokens:
                    run(each, Chunk(key, prompt(tokens, seed=number), 0, PAGES[key], "all"))
        watch: dict[str, Any] = {"on_layer": told.append, "cancelled": lambda: False} if way == "announced" else {}
        found, expected = engine.step(plan(wanted), **watch), whole.step(plan(wanted), trace=StepTrace())
        check_written(plan(wanted), found)
        assert told == (list(range(of.layers)) if watch else [])
        assert found.logits.keys() == expected.logits.keys() and len(found.logits) == (5, 0)[number]
        for key, scores in expected.logits.items():
            assert relative_error(found.logits[key], scores) < TOLERANCES["fp32"], key
        assert (found.counters, found.written) == (expected.counters, expected.written)
        assert torch.equal(engine.cache.storage, whole.cache.storage)


@pytest.mark.parametrize("kernels", ["plain", "native"])
def test_they_are_those_of_a_decoder_written_apart(kernels: str) -> None:
    engine, ids = tiny_engine(kernels=kernels), {"a": prompt(40, seed=1), "b": prompt(33, seed=2)}
    chunks = (Chunk("a", ids["a"], 0, tuple(range(10))), Chunk("b", ids["b"], 0, tuple(range(10, 20)), "none"))
    found = run(engine, *chunks, Chunk("c", ids["b"], 0, tuple(range(20, 30)), "all")).logits
    for key, scores in {
        "a": oracle.logits(tiny_model(), ids["a"])[-1:],
        "c": oracle.logits(tiny_model(), ids["b"]),
    }.items():
        assert relative_error(found[key], scores) < TOLERANCES["fp32"]


def test_in_deterministic_mode_they_have_the_bits_of_a_step_that_computes_all() -> None:
    engine, whole = (tiny_engine(deterministic=True, pages=200) for _ in range(2))
    found, expected = engine.step(plan(WANTED)), whole.step(plan(WANTED), trace=StepTrace())
    assert all(torch.equal(found.logits[key], scores) for key, scores in expected.logits.items())


def test_a_prompt_can_be_cancelled_before_the_last_layer() -> None:
    engine, told = tiny_engine(kernels="native"), list[int]()
    with pytest.raises(Cancelled):
        engine.step(
            StepPlan((replace(plan(WANTED).chunks[1], pages=tuple(range(10))),)),
            on_layer=told.append,
            cancelled=lambda: len(told) == 2,
        )
    assert told == [0, 1]
