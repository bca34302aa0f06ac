"""Weights as the kernels read them: in panels (products.h), from front to back, whatever the number of rows.

A packed weight takes the place of the one it was made from, so nothing is held twice; an embedding that is tied to the
head is looked up in its panels. Plain torch goes on with it: a packed product can be called like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.large_pages import Room
from pdserve.engine.native import library as c
from pdserve.engine.parts import Linear, QuantizedLinear

PANEL = 64  # most outputs of a panel
WIDTHS = (64, 48, 32)  # of panels whose outputs are alike
VECTOR = 16

Apply = Callable[[c.Matrix, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """x W^T + b, of one matrix or of several stacked ones.

    `apply` multiplies x [T, inputs] with one of them, in the thread of the engine that it belongs to.
    """

    matrices: tuple[c.Matrix, ...]
    kept: tuple[Tensor, ...]  # what the matrices point into
    apply: Apply

    @property
    def outputs(self) -> int:
        return sum(matrix.outputs for matrix in self.matrices)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        parts = [self.apply(matrix, rows) for matrix in self.matrices]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(*x.shape[:-1], self.outputs)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of one packed matrix, as an embedding that shares the head's weights is looked up."""

    panels: Tensor  # [panels, cells, lanes, pair], a group to a panel
    shape: tuple[int, int]  # [outputs, inputs]

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def device(self) -> torch.device:
        return self.panels.device

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids [T] -> rows [T, inputs]."""
        lanes = self.panels.shape[2]
        cells = self.panels[ids // lanes, :, ids % lanes]  # [T, cells, pair]
        return cells.flatten(1)[:, : self.shape[1]].contiguous()


def packed(
    product: Linear | QuantizedLinear, apply: Apply, room: Room, pair: int, parts: int = 1, group: int = 0
) -> PackedLinear:
    """The product in panels. Raises MemoryError.

    Args:
        room: where the panels lie.
        pair: inputs of a cell.
        parts: so many matrices of as many outputs each, stacked.
        group: outputs that one task computes; 0: those of a panel.
    """
    matrices, kept = [], []
    scales = product.scale if isinstance(product, QuantizedLinear) else None
    for number, weight in enumerate(product.weight.chunk(parts)):
        outputs, inputs = weight.shape
        rows = slice(number * outputs, (number + 1) * outputs)
        lanes = _even_lanes(group) if group else _lanes(outputs, torch.get_num_threads())
        panels = pack(weight, group or lanes, lanes, pair, room)
        scale, bias = (None if t is None else t[rows].detach().float().contiguous() for t in (scales, product.bias))
        kept += [t for t in (panels, scale, bias) if t is not None]
        address = [None if t is None else t.data_ptr() for t in (panels, scale, bias)]
        matrices.append(c.Matrix(*address, outputs, inputs, group or lanes, lanes))
    return PackedLinear(tuple(matrices), tuple(kept), apply)


def pack(weight: Tensor, group: int, lanes: int, pair: int, room: Room) -> Tensor:
    """weight [outputs, inputs] -> [panels, cells, lanes, pair]; zeros where these are not full."""
    outputs, inputs = weight.shape
    groups, each, cells = -(-outputs // group), -(-group // lanes), -(-inputs // pair)
    grouped = _filled(weight, groups * group, cells * pair).view(groups, group, -1)
    whole = _filled(grouped, each * lanes, cells * pair).view(groups * each, lanes, cells, pair)
    with torch.inference_mode(False):
        panels = room.take((groups * each, cells, lanes, pair), weight.dtype)
        of_cells = {1: torch.int8, 2: torch.int16, 4: torch.int32}[pair * weight.element_size()]
        panels.view(of_cells).copy_(whole.view(of_cells).transpose(1, 2))  # a cell is moved as one number
    return panels


def _filled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    missing = (columns - matrix.shape[-1], rows - matrix.shape[-2])
    return F.pad(matrix, (0, missing[0], 0, missing[1])) if any(missing) else matrix.contiguous()


def _even_lanes(group: int) -> int:
    """Of the fewest panels that hold a group, all of one width."""
    return _whole_vectors(-(-group // -(-group // PANEL)))


def _whole_vectors(lanes: int) -> int:
    return -(-lanes // VECTOR) * VECTOR


def _lanes(outputs: int, threads: int) -> int:
    """The width whose panels the threads share most evenly; the widest of these."""
    if outputs < WIDTHS[-1]:
        return _whole_vectors(outputs)

    def share(width: int) -> int:
        """Outputs of the thread that has most."""
        panels = -(-outputs // width)
        return -(-panels // threads) * width

    return min(WIDTHS, key=share)
