"""Rotary position tables, ALiBi slopes, and which position schemes this engine can run.

A table row holds cos and sin of position * frequency for each rotary pair (i, i + dims/2):
cos as [cos, cos], sin as [-sin, sin], so that rotating is x * cos + swap(x) * sin where
swap exchanges the two halves (RoFormer, equation 34, in the "half" pairing).

How a scaling changes the frequencies is in rope_scaling.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.dtypes import wide
from pdserve.engine.rope_scaling import attention_factor, check_scaling, frequencies
from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError

# Rows are made in blocks of one fixed size, so that a row's bits do not depend on how long
# the whole table is (vectorised and scalar cosines may differ in the last bit).
_BLOCK = 256


class RotaryTable:
    """`cos` and `sin`, each [rows, dims] in the model's dtype; angles are taken in fp32 (or float64)."""

    def __init__(self, scheme: PositionScheme, rows: int, dtype: torch.dtype, device: str = "cpu") -> None:
        inverse = frequencies(scheme, wide(dtype))  # [dims / 2]
        factor = attention_factor(scheme)
        cos, sin = [], []
        for first in range(0, rows, _BLOCK):
            angles = torch.arange(first, first + _BLOCK, dtype=inverse.dtype)[:, None] * inverse
            cos.append((torch.cat([angles.cos(), angles.cos()], -1) * factor).to(dtype))
            sin.append((torch.cat([-angles.sin(), angles.sin()], -1) * factor).to(dtype))
        self.cos = torch.cat(cos).to(device)
        self.sin = torch.cat(sin).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, dims], ready to broadcast over heads."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotary_tables(spec: ModelSpec, rows: int, dtype: torch.dtype, device: str) -> tuple[RotaryTable | None, ...]:
    """One per layer, shared by layers of one scheme; None: the layer rotates nothing."""
    made: dict[PositionScheme, RotaryTable | None] = {}
    for layer in range(spec.layers):
        scheme = spec.positions_of(layer)
        if scheme not in made:
            made[scheme] = RotaryTable(scheme, rows, dtype, device) if scheme.kind == "rope" else None
    return tuple(made[spec.positions_of(layer)] for layer in range(spec.layers))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] rotated in its first `dims` entries; cos, sin [T, 1, dims]."""
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat([rotate(x[..., :dims], cos, sin), x[..., dims:]], -1)
    return torch.addcmul(x * cos, x.roll(dims // 2, -1), sin)


def alibi_slopes(spec: ModelSpec, device: str = "cpu") -> Tensor | None:
    """[Hkv, group] in float64: the slope of each query head; None without ALiBi.

    The paper's: 2^(-8/n), its square, and so on for n heads; for an n that is no power of two those of the next
    lower power, then every other one of the next higher.
    """
    if spec.positions.kind != "alibi":
        return None
    lower = 2 ** int(math.log2(spec.heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * lower)) for i in range(spec.heads - lower)]
    return torch.tensor(slopes, dtype=torch.float64, device=device).view(spec.kv_heads, -1)


def check_schemes(spec: ModelSpec) -> None:
    """Raises CheckpointError naming the position option that this engine cannot run."""
    shapes = [spec.shape_of(layer) for layer in range(spec.layers)]
    check_scheme(spec.positions, max(shape.head_dim for shape in shapes), ("rope", "learned", "alibi", "none"))
    if spec.layer_positions and len(spec.layer_positions) != spec.layers:
        raise _unsupported("layer_positions", len(spec.layer_positions), f"one scheme for each of {spec.layers} layers")
    for layer, scheme in enumerate(spec.layer_positions or (spec.positions,) * spec.layers):
        if shapes[layer].kv_heads:
            check_scheme(scheme, shapes[layer].head_dim, ("rope", "none") if spec.layer_positions else (scheme.kind,))
    if spec.layer_positions and spec.positions.kind != "rope":
        raise _unsupported("layer_positions", spec.positions.kind, "layers of their own beside rope only")
    if spec.positions.scaling == "dynamic" and spec.context_limit > spec.positions.original_max_positions:
        limit = spec.positions.original_max_positions
        raise _unsupported("context_limit", spec.context_limit, f"dynamic scaling within its {limit} positions")
    if spec.positions.kind == "alibi" and spec.positions.dims != spec.heads:
        raise _unsupported("positions.dims", spec.positions.dims, f"a slope for each of {spec.heads} heads")


def check_scheme(scheme: PositionScheme, head_dim: int, kinds: tuple[str, ...]) -> None:
    if scheme.kind not in kinds:
        raise _unsupported("positions.kind", scheme.kind, ", ".join(kinds))
    if scheme.kind != "rope":
        return
    if scheme.interleaved:
        raise _unsupported("positions.interleaved", True, "rows of q and k reordered to half pairing by the loader")
    if not scheme.keys_cached_rotated:
        raise _unsupported("positions.keys_cached_rotated", False, "keys cached after rotation")
    if scheme.dims % 2 or not 0 < scheme.dims <= head_dim:
        raise _unsupported("positions.dims", scheme.dims, f"an even number from 2 to the head dim {head_dim}")
    if not (math.isfinite(scheme.theta) and scheme.theta > 0):
        raise _unsupported("positions.theta", scheme.theta, "a positive number")
    check_scaling(scheme)


def _unsupported(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{value!r} is not supported",
        reason="UNSUPPORTED_POSITIONS",
        field=field,
        remedy=f"this engine runs {expected}",
    )
