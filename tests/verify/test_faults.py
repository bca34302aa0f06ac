"""Each failure that the prefill contract lists, planted in the engine, is found and its first place named.

The baseline is the peer library, which no plant touches. The plants that the engine's own tests
know are used again; those that need another shape of batch are here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine import attention, batch
from pdserve.engine.engine import Engine
from pdserve.engine.handover import SequenceSink
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig, StepOutput, StepPlan
from pdserve.engine.positions import RotaryTable
from pdserve.verify.compare import Comparison
from pdserve.verify.diagnose import diagnose
from pdserve.verify.local import TracedEngine, run_engine
from pdserve.verify.models import Models
from pdserve.verify.run import Request, verify
from tests.engine import test_faults as plants
from tests.engine.tiny import prompt
from tests.verify.support import sides

LAYERS = 3
PAIR = (prompt(9, 1, 61), prompt(4, 2, 61))
UNEQUAL = (prompt(9, 1, 61), prompt(30, 2, 61))
Plant = Callable[[pytest.MonkeyPatch], None]


def planted(
    patch: pytest.MonkeyPatch, plant: Plant, model: Path, words: str, *, ids: Any = PAIR, tokens: int = 3
) -> Comparison:
    """The peer against an engine that turns bad once it is built: a deterministic one proves its kernels before."""
    build = Models.engine
    done: list[Plant] = []

    def broken(self: Models, side: Any, pages: int, kind: type[Engine]) -> Engine:
        made = build(self, side, pages, kind)
        if not done:
            plant(patch)
            done.append(plant)
        return made

    patch.setattr(Models, "engine", broken)
    ((comparison,), _) = verify(sides(f"{model},transformers", words), Request(ids=ids, tokens=tokens))
    assert done
    return comparison


def first(comparison: Comparison) -> tuple[int, str]:
    assert comparison.first is not None
    return comparison.first.layer, comparison.first.tensor


CASES: list[tuple[Plant, str, dict[str, Any], tuple[int, str], str]] = [
    (plants.reads_the_last_column, "batched:2", {"tokens": 1}, (LAYERS, "logits"), "first-step prefix: every layer"),
    (plants.one_layer_misses_a_token, "alone", {}, (1, "length"), "cache length: layer 1"),
    (plants.positions_restart, "reused", {}, (-1, "positions"), "positions: token 8"),
    (plants.heads_mapped_round_robin, "alone", {}, (0, "attended"), "head mapping: query head 1 reads KV head 1"),
    (plants.padding_keys_visible, "batched:2", {"ids": UNEQUAL}, (0, "attended"), ""),
    (plants.masked_keys_stay_in_the_denominator, "alone", {}, (0, "attended"), "causality: the prompt's last row"),
    (plants.every_key_visible, "alone", {}, (0, "attended"), "causality: the prompt's last row"),
    (plants.logits_of_another_request, "batched:2", {"tokens": 1}, (LAYERS, "logits"), "the logits of prompt 2"),
]


@pytest.mark.parametrize("kernels", ["plain", "deterministic"])
@pytest.mark.parametrize("plant, words, options, place, hint", CASES, ids=[case[0].__name__ for case in CASES])
def test_the_first_place_of_a_planted_fault_is_named(
    plant: Plant,
    words: str,
    options: dict[str, Any],
    place: tuple[int, str],
    hint: str,
    kernels: str,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison = planted(monkeypatch, plant, llama, f"{kernels},{words}", **options)
    assert not comparison.equal
    assert first(comparison) == place
    assert any(hint in said for said in diagnose(comparison)), diagnose(comparison)


def test_padding_in_a_decode_batch_is_told_from_a_wrong_prompt(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = planted(monkeypatch, plants.padding_keys_visible, llama, "batched:2", ids=UNEQUAL)
    assert comparison.first is not None and comparison.first.token >= len(UNEQUAL[comparison.first.prompt])
    assert any(said.startswith("decode:") for said in diagnose(comparison))


def test_the_rule_that_an_engine_breaks_is_named_besides(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = planted(monkeypatch, plants.every_key_visible, llama, "alone")
    assert [broken.check for broken in comparison.right.broken] == ["causality"]
    assert not comparison.left.broken


def no_key_visible(patch: pytest.MonkeyPatch) -> None:
    def bounds(self: batch.Batch, window: int) -> Any:
        end = (self.places + 1) * (self.places != 7)
        return torch.zeros_like(end), end

    patch.setattr(batch.Batch, "bounds", bounds)


def test_a_row_without_keys_ends_the_run_and_that_is_the_finding(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = planted(monkeypatch, no_key_visible, llama, "alone")
    assert first(comparison) == (-1, "run")
    assert comparison.first is not None and "sees no key" in comparison.first.detail


def test_nan_of_a_row_without_keys_is_found_where_it_begins(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        no_key_visible(patch)
        patch.setattr(attention, "check_visible", lambda first, end: None)

    comparison = planted(monkeypatch, plant, llama, "alone")
    assert first(comparison) == (0, "attended")
    assert comparison.first is not None and comparison.first.token == 7
    assert comparison.first.detail == "not finite on one side"


def test_a_prefix_of_another_adapter_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that are found hold what a model with other values made of the same prefix."""
    adapted: list[Engine] = []
    real, build = TracedEngine.step, TracedEngine.__init__

    def init(self: TracedEngine, model: LoadedModel, config: EngineConfig) -> None:
        build(self, model, config)
        tensors = {**model.tensors, "layers.0.v.weight": model.tensors["layers.0.v.weight"] * 1.5}
        other = Engine(LoadedModel("adapted", model.spec, tensors, model.dtype, model.digest), config)
        other.cache = other._kernels.current().cache = self.cache  # one pool serves both
        adapted.append(other)

    def step(self: TracedEngine, plan: StepPlan, **options: Any) -> StepOutput:
        output = real(self, plan, **options)
        if plan.chunks[0].key.startswith("cache"):
            adapted[-1].step(plan)
        return output

    monkeypatch.setattr(TracedEngine, "__init__", init)
    monkeypatch.setattr(TracedEngine, "step", step)
    ((comparison,), _) = verify(sides(str(tiny), "reused"), Request(ids=PAIR, tokens=2))
    assert first(comparison) == (0, "v")
    assert any(said.startswith("reuse: only reused tokens differ") for said in diagnose(comparison))


def test_a_cache_that_arrives_wrong_is_named_by_layer_and_tensor(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every check of the transfer: the pages are written in another order of heads."""
    write = SequenceSink.write

    def swapped(self: SequenceSink, plane: str, layer: int, heads: Any, tokens: Any, payload: memoryview) -> None:
        if (plane, layer) == ("k", 1):
            values = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(tokens[1] - tokens[0], -1, 8)
            payload = values.flip(1).contiguous().numpy().data.cast("B")
        write(self, plane, layer, heads, tokens, payload)

    monkeypatch.setattr(SequenceSink, "write", swapped)
    ((comparison,), _) = verify(sides(str(tiny), "handoff"), Request(ids=PAIR, tokens=3))
    assert first(comparison) == (1, "k")
    assert any("stored or transferred" in said for said in diagnose(comparison))


def test_other_positions_are_told_from_other_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that differ by a rotation only."""
    real = RotaryTable.rows
    ((comparison,), _) = _after_the_baseline(
        monkeypatch, lambda patch: patch.setattr(RotaryTable, "rows", lambda self, at: real(self, at + 1)), tiny
    )
    assert first(comparison) == (0, "k")
    assert any("differ by a rotation only" in said for said in diagnose(comparison))


def _after_the_baseline(patch: pytest.MonkeyPatch, plant: Plant, model: Path) -> Any:
    """A baseline of our own that is sound, then the plant."""
    ran: list[int] = []

    def running(*arguments: Any) -> Any:
        if ran:
            plant(patch)
        ran.append(1)
        return run_engine(*arguments)

    patch.setattr("pdserve.verify.run.run_engine", running)
    return verify(sides(str(model), "nhd"), Request(ids=PAIR, tokens=2))


def test_visible_keys_are_compared_exactly(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((comparison,), _) = _after_the_baseline(monkeypatch, plants.every_key_visible, tiny)
    assert first(comparison) == (0, "visible")
    assert any(
        said.startswith("causality: token 0 sees the keys [0, 1) against [0, 9)") for said in diagnose(comparison)
    )


def test_a_handoff_that_the_workers_refuse_is_a_finding(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving, a worker counts what each layer stored; the run ends there, and that is not equal."""
    plants.one_layer_misses_a_token(monkeypatch)
    ((comparison,), _) = verify(sides(str(tiny), "handoff"), Request(ids=PAIR, tokens=3))
    assert first(comparison) == (-1, "run")
    assert comparison.first is not None and "layer 1 stored 8 of 9 tokens" in comparison.first.detail
