"""LoRA adapters of one engine: rows of an adapter get y = x W^T + b + (x A^T) B^T where others get y = x W^T + b.

One step may mix rows of several adapters with rows of the base model. A row without an adapter keeps its bits: nothing
is added to it, not even zero. The factors are in the precision of sums (fp32 beside bf16), and the result is rounded
once. In deterministic mode a product is computed for a whole tile and taken for the adapter's rows alone, so that
their bits, too, depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.dtypes import wide
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.request import unknown_adapter

Add = Callable[[str, Tensor, Tensor], Tensor]
"""(product, x, y) -> y with what the rows' adapters add to a layer's qkv, o, up, down, conv_in or conv_out."""

Factor = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to the columns [start, end) of one product's output."""

    start: int
    end: int
    a: Factor  # [T, inputs] -> [T, rank]
    b: Factor  # [T, rank] -> [T, end - start]; holds the scale

    def __call__(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.to(wide(x.dtype))))


@dataclass(frozen=True)
class Adapter:
    """One version of an adapter, ready to compute."""

    digest: bytes  # 32 bytes over its content, see adapter_files.py
    deltas: Mapping[tuple[int, str], tuple[Delta, ...]] = field(repr=False)  # by layer and product
    rank: int  # the largest
    size: int  # bytes


class Adapters:
    """What an engine can compute with besides its base model.

    May change while a step runs, but for the adapters that the step uses.
    """

    def __init__(self, tiled: bool) -> None:
        self._tiled = tiled
        self._held: dict[bytes, Adapter] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, adapter: Adapter) -> None:
        """Idempotent: equal digests are equal adapters."""
        self._held[adapter.digest] = adapter

    def remove(self, digest: bytes) -> None:
        """Idempotent. Later steps refuse chunks with it."""
        self._held.pop(digest, None)

    def check(self, plan: StepPlan) -> None:
        """Raises NotFound for the first chunk whose adapter is not here: it never computes with the base model."""
        for chunk in plan.chunks:
            if chunk.adapter is not None and chunk.adapter not in self._held:
                raise unknown_adapter(chunk.adapter)

    def rows(self, chunks: Iterable[Chunk], device: torch.device) -> AdapterRows | None:
        """Which rows of a step compute with which adapter; None if all are the base model's.

        Args:
            chunks: in row order; checked.
        """
        chunks = tuple(chunks)
        digests = dict.fromkeys(chunk.adapter for chunk in chunks if chunk.adapter is not None)
        if not digests:
            return None
        numbers: dict[bytes | None, int] = {None: 0, **{digest: n for n, digest in enumerate(digests, start=1)}}
        which = [numbers[chunk.adapter] for chunk in chunks for _ in chunk.ids]
        adapters = tuple(self._held[digest] for digest in digests)
        return AdapterRows(adapters, torch.tensor(which, dtype=torch.int64, device=device), self._tiled)


class AdapterRows:
    """The adapters of one step. `which` [T]: 0 for the base model, n for adapters[n - 1]."""

    def __init__(self, adapters: tuple[Adapter, ...], which: Tensor, tiled: bool) -> None:
        self.which = which
        self._adapters = tuple(enumerate(adapters, start=1))
        self._tiled = tiled
        self._rows = {} if tiled else {n: torch.nonzero(which == n)[:, 0] for n, _ in self._adapters}

    def at(self, layer: int, which: Tensor) -> Add:
        """For the rows of one tile, or (not tiled) of the whole step."""
        return partial(self._add_tile if self._tiled else self._add, layer, which)

    def _add(self, layer: int, which: Tensor, product: str, x: Tensor, y: Tensor) -> Tensor:
        for number, adapter in self._adapters:
            rows = self._rows[number]
            deltas = adapter.deltas.get((layer, product), ())
            own = x.index_select(0, rows) if deltas else x
            for delta in deltas:
                part = y[:, delta.start : delta.end]
                part.index_copy_(0, rows, _sum(part.index_select(0, rows), delta(own)))
        return y

    def _add_tile(self, layer: int, which: Tensor, product: str, x: Tensor, y: Tensor) -> Tensor:
        for number, adapter in self._adapters:
            mine = (which == number)[:, None]
            if not bool(mine.any()):
                continue
            for delta in adapter.deltas.get((layer, product), ()):
                part = y[:, delta.start : delta.end]
                part.copy_(torch.where(mine, _sum(part, delta(x)), part))
        return y


def check_rows_of(
    adapter: Adapter, generator: torch.Generator, inputs: Mapping[tuple[int, str], int], dtype: torch.dtype
) -> None:
    """Proves for each shape of what an adapter changes that a row's delta depends on the row alone.

    Args:
        inputs: the width of a product's input, by layer and product.

    Raises Internal if that does not hold on this build of torch.
    """
    proven: set[tuple[str, int, tuple[tuple[int, int], ...]]] = set()
    for (layer, product), deltas in adapter.deltas.items():
        shape = product, inputs[layer, product], tuple((delta.start, delta.end) for delta in deltas)
        if shape in proven:
            continue
        proven.add(shape)
        x = torch.randn(deterministic.ROWS, shape[1], generator=generator, dtype=wide(dtype)).to(dtype)
        for delta in deltas:
            deterministic.check_rows(f"an adapter of {product}", lambda r, d=delta: (d(r),), x)


def _sum(y: Tensor, delta: Tensor) -> Tensor:
    return delta.add_(y).to(y.dtype)
