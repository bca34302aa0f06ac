"""The memory of a paged cache: one allocation, and a tensor of it for each plane of each layer.

Layers of equal planes lie together in one block, [layers, planes, ...], so that a model whose layers are all alike is
one block. A layer without planes has no part in any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_transfer.contract import CachePlane
from pdserve.engine.large_pages import zeros
from pdserve.errors import Internal

Shape = tuple[int, int]  # heads and head_dim
_ALIGNMENT = 64  # scalars, hence bytes as well


class Storage:
    """Zeroed. In each plane the axes are [heads, slots, head_dim] or, of `nhd`, [slots, heads, head_dim]."""

    def __init__(
        self,
        planes: Sequence[tuple[CachePlane, ...]],
        slots: int,
        heads_first: bool,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        kinds: dict[tuple[CachePlane, ...], list[int]] = {}
        for layer, found in enumerate(planes):
            if found:
                kinds.setdefault(found, []).append(layer)
        sizes = [(len(layers), len(found), *_plane_size(found, slots, heads_first)) for found, layers in kinds.items()]
        starts, end = [], 0
        for size in sizes:
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + math.prod(size)
        large = device == "cpu" and end > 0
        whole = zeros(end * dtype.itemsize).view(dtype) if large else torch.zeros(end, dtype=dtype, device=device)
        self.blocks = [whole[at : at + math.prod(size)].view(size) for at, size in zip(starts, sizes, strict=True)]
        self.whole = self.blocks[0] if len(kinds) == 1 and all(planes) else whole
        """All of it; [layers, planes, ...] where all layers are alike."""
        self.layers: list[Tensor | None] = [None] * len(planes)  # [planes, ...]; None: no planes
        for block, layers in zip(self.blocks, kinds.values(), strict=True):
            for place, layer in enumerate(layers):
                self.layers[layer] = block[place]
        self.planes: list[Mapping[str, Tensor]] = [
            {} if block is None else {plane.name: block[n] for n, plane in enumerate(found)}
            for found, block in zip(planes, self.layers, strict=True)
        ]
        self.shapes: list[Mapping[str, Shape]] = [{p.name: (p.heads, p.head_dim) for p in found} for found in planes]
        self.bytes: list[Mapping[str, NDArray[np.uint8]]] = [
            {name: plane.view(torch.uint8).numpy() for name, plane in found.items()} if device == "cpu" else {}
            for found in self.planes
        ]
        """The planes as bytes, without a copy; empty on a device, whose memory numpy cannot see."""


def _plane_size(planes: tuple[CachePlane, ...], slots: int, heads_first: bool) -> tuple[int, int, int]:
    """Of each plane of a layer. Raises Internal where they differ: they are gathered as one tensor."""
    shapes = {(plane.heads, plane.head_dim) for plane in planes}
    if len(shapes) > 1:
        raise Internal(f"the planes of a layer have the shapes {sorted(shapes)}", field="planes")
    ((heads, head_dim),) = shapes
    return (heads, slots, head_dim) if heads_first else (slots, heads, head_dim)
