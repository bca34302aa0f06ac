"""Two runs of one engine compared layer by layer, every tensor that a trace has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.engine.batch import Batch
from pdserve.engine.checks import TOLERANCES, relative_error
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepOutput, StepPlan
from pdserve.engine.trace import StepTrace


@dataclass(frozen=True)
class Divergence:
    """The first place where two runs differ by more than the tolerance."""

    layer: int  # -1: before the first layer; the number of layers: the logits
    what: str  # positions | x | k | v | attended | y | logits | top
    error: float


def baseline(engine: Engine, ids: tuple[int, ...], pages: tuple[int, ...]) -> tuple[StepTrace, StepOutput]:
    """One sequence, no reuse, one step: what every other run of these ids is compared with."""
    trace = StepTrace()
    output = engine.step(StepPlan((Chunk("baseline", ids, 0, pages, "all"),)), trace=trace)
    return trace, output


def first_divergence(
    engine: Engine, base: tuple[StepTrace, StepOutput], run: list[tuple[StepTrace, StepOutput]], key: str
) -> Divergence | None:
    """Compares the steps that ran sequence `key` (in order) with its baseline, layer by layer.

    Positions are compared exactly, tensors and logits within TOLERANCES, and where both top
    scores are further apart than that, the top id as well. None: no divergence.
    """
    tolerance = TOLERANCES[engine.config.dtype]
    whole = base[0]
    parts = [(trace, rows_of(trace, key)) for trace, _ in run]
    positions = torch.cat([batch_of(trace).positions[rows] for trace, rows in parts])
    if not torch.equal(positions, batch_of(whole).positions[-len(positions) :]):
        return Divergence(-1, "positions", float("inf"))
    for layer in range(len(whole.layers)):
        for what in ("x", "k", "v", "attended", "y"):
            got = torch.cat([getattr(trace.layers[layer], what)[rows] for trace, rows in parts])
            want = getattr(whole.layers[layer], what)
            error = relative_error(got, want[-len(got) :], want)
            if not error <= tolerance:
                return Divergence(layer, what, error)
    scores, expected = run[-1][1].logits[key][-1], base[1].logits["baseline"][-1]
    error = relative_error(scores, expected, base[1].logits["baseline"])
    if not error <= tolerance:
        return Divergence(len(whole.layers), "logits", error)
    best = expected.topk(2).values
    if int(scores.argmax()) != int(expected.argmax()) and float(best[0] - best[1]) > 2 * tolerance * float(
        expected.abs().max()
    ):
        return Divergence(len(whole.layers), "top", error)
    return None


def batch_of(trace: StepTrace) -> Batch:
    assert trace.batch is not None
    return trace.batch


def rows_of(trace: StepTrace, key: str) -> slice:
    row = 0
    for chunk in batch_of(trace).chunks:
        if chunk.key == key:
            return slice(row, row + len(chunk.ids))
        row += len(chunk.ids)
    raise AssertionError(f"the step did not run {key}")
