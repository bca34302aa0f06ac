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

    dtype: str = "fp32"
    """Of weights and activations: fp32, bf16, fp16, float64, or auto: the checkpoint's own. bf16 is about twice as fast
    on a CPU with bf16 instructions, and rounds logits so coarsely that near ties are decided by it."""

    kv_dtype: str = ""
    """Of the KV cache; empty: the same as `dtype`."""

    pages: int = 1024
    """Pages of the KV cache, taken at the start. With `page_size` tokens each, they bound what a worker can hold."""

    page_size: int = 16
    """Tokens of a page."""

    axis_order: str = "hnd"
    """Layout of a page: hnd (heads outermost) or nhd (tokens outermost)."""

    device: str = "cpu"
    """Where the model runs: cpu, or a torch device such as cuda."""

    threads: int = 1
    """Threads that compute one step; holds for the whole process."""

    deterministic: bool = False
    """Bit-equal results across batch, chunk and page size, and cache state. Slower."""

    weights: str = ""
    """int8: weights as 8-bit numbers with a scale per output; about half the memory traffic of bf16, with an error
    that `python -m benchmarks.engine` prints. Part of the contract. Empty: in `dtype`."""

    kernels: str = "auto"
    """auto: our own CPU kernels where a compiled library is kept, plain torch until one is compiled in the
    background, and where it cannot be. native: waits for them, and refuses to start without. plain: torch only."""

    keep_digests: bool = True
    """Keeps the digests of a checkpoint's tensors beside it, so that the next start need not hash it again."""


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
    adapter: bytes | None = None  # digest of what all its tokens are computed with; None: the base model


@dataclass(frozen=True)
class StepPlan:
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StepCounters:
    """Logical work of a step, padding excluded; what is left out because nobody reads it is counted."""

    positions: int = 0  # positions projected to q, k, v, summed over layers
    score_pairs: int = 0  # visible (query, key) pairs, summed over layers and query heads

    def __add__(self, other: StepCounters) -> StepCounters:
        return StepCounters(self.positions + other.positions, self.score_pairs + other.score_pairs)


@dataclass(frozen=True)
class StepOutput:
    """`logits[key]` is [1 or len(ids), vocab_size] in fp32 (float64 for a float64 model)."""

    logits: Mapping[str, Tensor]
    counters: StepCounters = field(default_factory=StepCounters)
    written: tuple[int, ...] = ()  # K and V rows that each layer's cache has stored
