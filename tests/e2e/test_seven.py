"""The tiny decoder of spec section B through the whole service: known answers, logits and counts.

It is written to a checkpoint file, loaded from it by both workers, and asked with token ids.
Both engines count their own work; the comparison recomputes everything, in real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model, save_spec_checkpoint
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepCounters, StepPlan
from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc.events import LENGTH, Usage
from tests.e2e.stack import pair
from tests.e2e.watched import WatchedEngine
from tests.engine.tiny import SEVEN, seven_model

PROMPT = (0, 1, 2, 3)
ANSWER = (3, 2, 0, 4, 2)
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "seven.pdmodel"
    save_spec_checkpoint(path, SEVEN, seven_model().tensors)
    return path


@dataclass
class Recomputed:
    """Each token from nothing but ids: no page is read twice."""

    ids: tuple[int, ...]
    logits: list[Tensor]  # [vocab], per step
    keys: list[list[tuple[Tensor, Tensor]]]  # per step and layer: K and V [Hkv, tokens, d]
    counters: StepCounters


def recompute(model: LoadedModel, tokens: int) -> Recomputed:
    engine = Engine(model, EngineConfig(dtype="float64", pages=tokens * 8, page_size=2))
    made = Recomputed((), [], [], StepCounters())
    for step in range(tokens):
        ids = PROMPT + made.ids
        pages = tuple(range(8 * step, 8 * step + -(-len(ids) // 2)))
        output = engine.step(StepPlan((Chunk("r", ids, 0, pages),)))
        made.logits.append(output.logits["r"][-1].clone())
        made.ids += (int(made.logits[-1].argmax()),)
        made.keys.append([engine.cache.sequence(layer, pages, len(ids)) for layer in range(SEVEN.layers)])
        made.counters += output.counters
    return made


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    ("tokens", "work", "full_work"),
    [(4, StepCounters(14, 112), StepCounters(44, 296)), (5, StepCounters(16, 144), StepCounters(60, 440))],
)
async def test_answers_logits_cache_and_work_are_those_of_the_specification(
    checkpoint: Path, tokens: int, work: StepCounters, full_work: StepCounters, deterministic: bool
) -> None:
    model = load_model(checkpoint, "float64")
    full = recompute(model, tokens)
    assert full.ids == ANSWER[:tokens] and full.counters == full_work

    options: dict[str, Any] = {"dtype": "float64", "pages": 16, "deterministic": deterministic}
    prefill = WatchedEngine(model, EngineConfig(page_size=4, axis_order="hnd", **options))
    decode = WatchedEngine(load_model(checkpoint, "float64"), EngineConfig(page_size=3, axis_order="nhd", **options))
    async with pair(prefill, decode) as made:
        answer = await made.ask(PROMPT, SamplingParams(temperature=0, max_tokens=tokens))
        assert answer.ids == ANSWER[:tokens]
        assert (answer.finish.reason, answer.usage) == (LENGTH, Usage(4, tokens, 0))
        first = torch.frombuffer(bytearray(made.first_logits(answer)), dtype=torch.float64)

    # One prefill and tokens - 1 decode steps; the last token chosen is never in the cache.
    (prompt_step,) = prefill.steps
    chunks = [step.plan.chunks[0] for step in (prompt_step, *decode.steps)]
    assert [chunk.start + len(chunk.ids) for chunk in chunks] == list(range(4, 4 + tokens))
    assert [len(chunk.ids) for chunk in chunks] == [4] + [1] * (tokens - 1)
    assert prefill.counters + decode.counters == work

    logits = [first, *(rows[-1] for step in decode.steps for rows in step.logits.values())]
    for got, wanted in zip(logits, full.logits, strict=True):
        assert got.dtype == torch.float64
        assert float((got - wanted).abs().max()) <= TOLERANCE
    best = [scores.topk(2).values for scores in logits[:4]]
    assert min(float(first - second) for first, second in best) == pytest.approx(0.0315, abs=5e-5)

    # What lies in decode's pages at the end, handed over or computed there, is what a full run computes.
    end = chunks[-1]
    for layer, planes in enumerate(full.keys[-1]):
        for got, wanted in zip(decode.cache.sequence(layer, end.pages, 3 + tokens), planes, strict=True):
            assert got.shape == wanted.shape == (1, 3 + tokens, 4)
            assert float((got - wanted).abs().max()) <= TOLERANCE


async def test_an_empty_input_and_a_context_past_its_positions_are_errors(checkpoint: Path) -> None:
    model = load_model(checkpoint, "float64")
    config = EngineConfig(dtype="float64", pages=32, page_size=4)
    params = SamplingParams(temperature=0, max_tokens=1)
    async with pair(WatchedEngine(model, config), WatchedEngine(model, config)) as made:
        for ids, reason in (((), "EMPTY_PROMPT"), ((1,) * 64, "PROMPT_TOO_LONG")):
            with pytest.raises(InvalidRequest) as caught:
                await made.ask(ids, params)
            assert (caught.value.field, caught.value.reason) == ("prompt", reason)
        longest = await made.ask((1,) * 63, SamplingParams(temperature=0, max_tokens=9))
        assert (len(longest.ids), longest.finish.reason) == (1, LENGTH)  # 64 positions, and no more
