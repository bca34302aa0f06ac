"""Arithmetic whose bits depend on a row alone, never on its neighbours.

Deterministic mode gives bit-equal tokens and logits whatever the batch, chunking, page
size or cache state. Two rules make that so:

- Everything that works row by row (norms, projections, MLP, head) runs on tiles of exactly
  ROWS rows, padded with zero rows, in fresh aligned memory: a matrix product of another
  height may sum in another order. Both sides of a weight are padded to whole vectors with
  zeros, because kernels treat left-over columns, and rows that start off a vector boundary,
  in their own ways.
- Attention reads keys in blocks of KEYS positions that start at absolute position 0, in
  ascending order, with a running softmax on one fixed shape. A block that a query may not
  see multiplies its state by exactly one and adds exactly zero, so reading further blocks
  (because a neighbour in the tile needs them) changes nothing.

The promise is for one device, one torch build and one thread count; on the builds tested
another thread count gives the same bits too.

`check_rows` proves the first rule for the installed torch, on the model's own functions,
before an engine serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.errors import Internal

ROWS = 16
KEYS = 64
_VECTOR = 16  # elements
_COLUMNS = 1024  # ROWS * _COLUMNS elements stay below torch's threshold for splitting over threads

RowFunction = Callable[..., tuple[Tensor, ...]]


def in_tiles(function: RowFunction, *rows: Tensor) -> tuple[Tensor, ...]:
    """Applies a row-wise function to [T, ...] tensors, ROWS rows at a time."""
    count = rows[0].shape[0]
    tiles = [function(*(_tile(r, first) for r in rows)) for first in range(0, count, ROWS)]
    return tuple(torch.cat(parts)[:count] for parts in zip(*tiles, strict=True))


class PaddedLinear:
    """x W^T + b on tiles [ROWS, inputs]; holds a copy of W only where its sides are not whole vectors."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, inputs = weight.shape
        self._columns = -inputs % _VECTOR
        rows = -self.outputs % _VECTOR
        self.weight = F.pad(weight, (0, self._columns, 0, rows)) if rows or self._columns else weight
        self.bias = F.pad(bias, (0, rows)) if rows and bias is not None else bias

    def __call__(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self._columns)) if self._columns else x.contiguous()
        return F.linear(x, self.weight, self.bias)[:, : self.outputs]


def activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function on [ROWS, width] where each element takes the vectorised path.

    The scalar path for left-over elements may differ in the last bit, so columns are padded
    to whole vectors and cut into blocks too small to be split over threads.
    """
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % 64))
    blocks = [function(padded[:, c : c + _COLUMNS].contiguous()) for c in range(0, padded.shape[-1], _COLUMNS)]
    return torch.cat(blocks, -1)[:, :width]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    soft_cap: float,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence. q [n, Hq, d], k and v [Hkv, m, d], all in fp32 or float64.

    Query i sees the keys [first[i], end[i]), its own the last; slopes [Hkv, group] of ALiBi; sinks [Hkv, group].
    Returns [n, Hq, d].
    """
    kv_heads, keys, width = k.shape
    q = F.pad(q, (0, -width % _VECTOR))
    k, v = (F.pad(t, (0, -width % _VECTOR, 0, -keys % KEYS)) for t in (k, v))
    d = q.shape[-1]
    outputs = []
    for row in range(0, q.shape[0], ROWS):
        tile = _tile(q, row).view(ROWS, kv_heads, -1, d).permute(1, 0, 2, 3).reshape(kv_heads, -1, d)
        low, high = _tile(first, row), _tile(end, row)  # padding rows see nothing: [0, 0)
        group = tile.shape[1] // ROWS
        low, high = low.repeat_interleave(group), high.repeat_interleave(group)
        own_slopes, own_sinks = (None if heads is None else heads.repeat(1, ROWS) for heads in (slopes, sinks))
        out = _attend_tile(tile, k, v, low, high, scale, soft_cap, own_slopes, own_sinks)
        outputs.append(out.view(kv_heads, ROWS, group, d).permute(1, 0, 2, 3).reshape(ROWS, -1, d))
    return torch.cat(outputs)[: q.shape[0], :, :width]


def _attend_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    soft_cap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [Hkv, R, d] with R = ROWS * group; first, end [R]; slopes, sinks [Hkv, R]. Running softmax over key blocks,
    which a sink is there before: as a key with a value of zeros.
    """
    if sinks is None:
        best = q.new_full((*q.shape[:2], 1), -torch.inf)
        total = q.new_zeros((*q.shape[:2], 1))
    else:
        best, total = sinks[..., None].to(q.dtype), q.new_ones((*q.shape[:2], 1))
    out = torch.zeros_like(q)
    for block in range(0, int(end.max()), KEYS):
        keys = torch.arange(block, block + KEYS, device=q.device)
        visible = (keys >= first[:, None]) & (keys < end[:, None])  # [R, KEYS]
        scores = torch.bmm(q, k[:, block : block + KEYS].transpose(1, 2).contiguous()) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None:
            scores = scores + (slopes[..., None] * (keys - end[:, None] + 1)).to(scores.dtype)
        scores = scores.masked_fill(~visible, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        anchor = new_best.masked_fill(new_best == -torch.inf, 0.0)  # nothing seen yet: avoid inf - inf
        weights = torch.exp(scores - anchor)
        keep = torch.exp(best - anchor)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + torch.bmm(weights, v[:, block : block + KEYS].contiguous())
        best = new_best
    return out / total.masked_fill(total == 0, 1.0)


def check_rows(name: str, function: RowFunction, *samples: Tensor) -> None:
    """Raises Internal if a row's result depends on its place in the tile or on its neighbours.

    samples: the function's arguments with ROWS random rows each.
    """
    expected = function(*samples)
    alone = in_tiles(function, *(s[:1] for s in samples))
    turned = [function(*(s.roll(shift, 0) for s in samples)) for shift in range(1, ROWS)]
    for part, want in enumerate(expected):
        same = torch.equal(alone[part], want[:1]) and all(
            torch.equal(out[part].roll(-shift, 0), want) for shift, out in enumerate(turned, start=1)
        )
        if not same:
            raise Internal(
                f"this build of torch gives the rows of {name} other bits in another place of a tile",
                reason="NOT_DETERMINISTIC",
                field="deterministic",
                remedy="turn deterministic mode off or use another torch build",
            )


def _tile(x: Tensor, first: int) -> Tensor:
    """Rows [first, first + ROWS) in fresh memory, zero rows after the last."""
    rows = x[first : first + ROWS]
    tile = x.new_zeros((ROWS, *x.shape[1:]))
    tile[: rows.shape[0]] = rows
    return tile
