"""The tiny decoder with known answers (spec B), through the engine's own step and counters."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, EngineConfig, StepCounters
from pdserve.errors import CheckpointError, InvalidRequest
from tests.engine import oracle
from tests.engine.tiny import greedy, run, seven_model

PAGES = tuple(range(16))


def engine(deterministic: bool = False) -> Engine:
    config = EngineConfig(dtype="float64", pages=16, page_size=4, deterministic=deterministic)
    return Engine(seven_model(), config)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count, positions, pairs", [(4, 14, 112), (5, 16, 144)])
def test_cached_run(deterministic: bool, count: int, positions: int, pairs: int) -> None:
    outputs, logits, counters = greedy(engine(deterministic), [0, 1, 2, 3], PAGES, count)
    assert outputs == [3, 2, 0, 4, 2][:count]
    assert counters == StepCounters(positions, pairs)
    gaps = [float(best[0] - best[1]) for best in (scores.topk(2).values for scores in logits[:4])]
    assert min(gaps) == pytest.approx(0.0315, abs=5e-5)


@pytest.mark.parametrize("count, positions, pairs", [(4, 44, 296), (5, 60, 440)])
def test_full_recomputation_agrees(count: int, positions: int, pairs: int) -> None:
    cached, model = greedy(engine(), [0, 1, 2, 3], PAGES, count), engine()
    ids, counters = [0, 1, 2, 3], StepCounters()
    for step in range(count):
        out = run(model, Chunk("r", tuple(ids), 0, PAGES))
        counters += out.counters
        assert float((out.logits["r"][0] - cached[1][step]).abs().max()) < 1e-12
        ids.append(int(out.logits["r"][0].argmax()))
    assert (ids[4:], counters) == (cached[0], StepCounters(positions, pairs))


def test_cache_length_after_each_step() -> None:
    model = engine()
    ids, start = [0, 1, 2, 3], 0
    for expected in (4, 5, 6, 7):
        out = run(model, Chunk("r", tuple(ids[start:]), start, PAGES))
        for layer in range(2):
            k, _ = model.cache.sequence(layer, PAGES, 8)
            written = [bool(k[:, token].abs().sum()) for token in range(8)]
            assert written == [token < expected for token in range(8)]
        start = len(ids)
        ids.append(int(out.logits["r"].argmax()))


def test_logits_equal_the_oracle() -> None:
    ids = (0, 1, 2, 3, 3, 2, 0, 4, 2)
    out = run(engine(), Chunk("r", ids, 0, PAGES, "all"))
    assert float((out.logits["r"] - oracle.logits(seven_model(), ids)).abs().max()) < 1e-12


def test_appended_tokens_change_no_prefix_logits() -> None:
    short = run(engine(), Chunk("r", (0, 1, 2, 3), 0, PAGES, "all")).logits["r"]
    for token in range(6):
        long = run(engine(), Chunk("r", (0, 1, 2, 3, token, 5), 0, PAGES, "all")).logits["r"]
        assert float((long[:4] - short).abs().max()) < 1e-12


def test_empty_input_and_long_context_are_errors() -> None:
    model = engine()
    with pytest.raises(InvalidRequest) as empty:
        run(model, Chunk("r", (), 0, PAGES))
    assert empty.value.reason == "EMPTY_PROMPT"
    run(model, Chunk("r", (0,) * 64, 0, PAGES))
    with pytest.raises(InvalidRequest) as long:
        run(model, Chunk("r", (0,) * 65, 0, (*PAGES, 0)))
    assert long.value.reason == "PROMPT_TOO_LONG"


def test_a_layer_of_another_length_is_an_error() -> None:
    model = seven_model()
    assert isinstance(model.tensors, dict)
    model.tensors["pos"] = model.tensors["pos"][:63]
    with pytest.raises(CheckpointError, match="pos"):
        Engine(model, EngineConfig(dtype="float64"))
    assert torch.is_inference_mode_enabled() is False
