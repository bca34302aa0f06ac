"""The message boundary of the engine: plain data in, plain data and logits out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

LogitsWanted = Literal["none", "last", "all"]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes and stores. Part of it becomes the worker's contract."""

    dtype: str = "bf16"  # weights and activations: fp32 | bf16 | fp16 | float64
    kv_dtype: str = ""  # empty: as dtype
    pages: int = 1024  # pages in the pool
    page_size: int = 16  # tokens per page
    axis_order: str = "hnd"  # hnd: heads outermost; nhd: tokens outermost
    device: str = "cpu"
    threads: int = 1  # torch intra-op threads; set by the process that owns the engine
    deterministic: bool = False  # bit-equal across batch, chunk, page size, cache state


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to run in one step: a prefill chunk or one decode token.

    `pages` is the sequence's block table and covers [0, start + len(ids)); the engine
    reads tokens [0, start) from it and writes [start, start + len(ids)).
    """

    key: str
    ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    logits: LogitsWanted = "last"


@dataclass(frozen=True)
class StepPlan:
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StepCounters:
    """Logical work of a step, padding excluded."""

    positions: int = 0  # positions projected to q, k, v, summed over layers
    score_pairs: int = 0  # visible (query, key) pairs, summed over layers and query heads

    def __add__(self, other: StepCounters) -> StepCounters:
        return StepCounters(self.positions + other.positions, self.score_pairs + other.score_pairs)


@dataclass(frozen=True)
class StepOutput:
    """`logits[key]` is [1 or len(ids), vocab_size] in fp32 (float64 for a float64 model)."""

    logits: Mapping[str, Tensor]
    counters: StepCounters = field(default_factory=StepCounters)
