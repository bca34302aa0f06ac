"""One decode step: what the scheduler wants, and what the engine's thread makes of it.

Tokens whose logits came with the handoff are sampled by the same call as those that the
model computes, in a step before it (planning.py). Runs in the engine's thread; reads
samplers, changes nothing but pages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode_worker.sampling import Choice, Sampler, sample
from decode_worker.sequence import FirstLogits
from decode_worker.tail import Tail
from pdserve.engine.checks import check_written
from pdserve.engine.engine import Engine
from pdserve.engine.plan import StepCounters, StepPlan
from pdserve.engine.rate import Span
from pdserve.errors import Internal, PdserveError

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class DecodePlan:
    """`samplers` has one entry per token to choose: for each chunk with logits, and for each of `first`.

    A chunk without logits only computes again what a preempted sequence had cached.
    """

    step: StepPlan
    first: Mapping[str, FirstLogits]
    samplers: Mapping[str, Sampler]
    kept: frozenset[str] = frozenset()  # chunks whose last logits are wanted as they are
    copies: tuple[tuple[int, int], ...] = ()  # pages (from, to) that are copied before the model runs
    tail: Tail | None = None  # that runs some of its layers after all that
    tail_layers: int = 0

    @property
    def size(self) -> int:
        """Sequences in it."""
        return len(self.step.chunks) + len(self.first) + (self.tail is not None)

    @property
    def spans(self) -> list[Span]:
        """What its cost depends on, but for the tail's."""
        return [(chunk.start, len(chunk.ids)) for chunk in self.step.chunks]

    @property
    def all_spans(self) -> list[Span]:
        return self.spans if self.tail is None else [*self.spans, self.tail.span(self.tail_layers)]


@dataclass(frozen=True)
class DecodeOutput:
    """Per key the token that was chosen, or why none could be."""

    choices: Mapping[str, Choice | PdserveError]
    counters: StepCounters
    kept: Mapping[str, FirstLogits] = field(default_factory=dict)
    tail: FirstLogits | PdserveError | None = None  # of the plan's tail: its logits, if its last layer has run


def step_and_sample(engine: Engine, plan: DecodePlan) -> DecodeOutput:
    """Runs the model where the plan has chunks, then one sampler for all rows that have logits. Raises what
    `Engine.step` and `check_written` raise.
    """
    logits: dict[str, Tensor] = {}
    counters = StepCounters()
    for source, target in plan.copies:
        engine.cache.copy_page(source, target)
    if plan.step.chunks:
        output = engine.step(plan.step)
        check_written(plan.step, output)
        counters = output.counters
        logits = {key: rows[-1] for key, rows in output.logits.items()}
    kept = {key: kept_logits(logits.pop(key)) for key in plan.kept}
    for key, received in plan.first.items():
        logits[key] = first_logits(received)
    if logits.keys() != plan.samplers.keys():
        raise Internal("a step gave logits for other sequences than planned", reason="STEP_ROWS")
    keys = list(plan.samplers)
    choices = sample([(plan.samplers[key], logits[key]) for key in keys])
    return DecodeOutput(dict(zip(keys, choices, strict=True)), counters, kept, _advanced(engine, plan))


def _advanced(engine: Engine, plan: DecodePlan) -> FirstLogits | PdserveError | None:
    """A tail that fails is its own sequence's affair, which can do without."""
    if plan.tail is None:
        return None
    try:
        return plan.tail.advance(engine, plan.tail_layers)
    except PdserveError as error:
        return error
    except Exception:
        log.exception("layers of %s failed", plan.tail.owner)
        return Internal("the engine failed", reason="ENGINE_FAILED", remedy="see the worker's log", retryable=True)


def kept_logits(row: Tensor) -> FirstLogits:
    """[vocab] scores as they would have come with a handoff."""
    dtype = "float64" if row.dtype == torch.float64 else "fp32"
    return FirstLogits(dtype, row.detach().to("cpu", _DTYPES[dtype]).numpy().tobytes())


def first_logits(received: FirstLogits) -> Tensor:
    """[vocab] scores from the wire; a copy."""
    return torch.frombuffer(bytearray(received.data), dtype=_DTYPES[received.dtype])
