"""A model in memory, as every loader returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.engine.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.engine.stored import Source


@dataclass(frozen=True)
class LoadedModel:
    """Canonical tensors (`weights.expected_tensors`), already in `dtype`, on the CPU."""

    name: str  # default served name, from the checkpoint
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    dtype: str  # fp32 | bf16 | fp16 | float64
    digest: bytes  # 32 bytes over the checkpoint's content, before any cast
    path: Path | None = None  # where the tokenizer bundle can be found
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Canonical tensor -> where a Hugging Face directory has it, by which adapters name modules; empty: none can."""
