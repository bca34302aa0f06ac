"""What one step did, layer by layer, for checks and for comparing two runs. Off in service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from pdserve.engine.plan import StepPlan

if TYPE_CHECKING:
    from pdserve.engine.batch import Batch


@dataclass(frozen=True)
class LayerTrace:
    """One layer's tensors, rows in batch order. T rows."""

    x: Tensor  # [T, width] the layer's input
    q: Tensor  # [T, Hq, d] as used by attention
    k: Tensor  # [T, Hkv, d] as handed to the cache
    v: Tensor  # [T, Hkv, d]
    attended: Tensor  # [T, Hq, d]
    y: Tensor  # [T, width] the layer's output
    first: Tensor  # [T] each row saw the keys [first, end)
    end: Tensor  # [T]


@dataclass
class StepTrace:
    """Filled by `Engine.step(plan, trace=...)`. Holds every layer's tensors: for small runs."""

    layers: list[LayerTrace] = field(default_factory=list)
    plan: StepPlan | None = None
    batch: Batch | None = None
