"""Rotary position tables, and which position schemes this engine can run.

A table row holds cos and sin of position * frequency for each rotary pair (i, i + dims/2):
cos as [cos, cos], sin as [-sin, sin], so that rotating is x * cos + swap(x) * sin where
swap exchanges the two halves (RoFormer, equation 34, in the "half" pairing).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.dtypes import wide
from pdserve.errors import CheckpointError

# Rows are made in blocks of one fixed size, so that a row's bits do not depend on how long
# the whole table is (vectorised and scalar cosines may differ in the last bit).
_BLOCK = 256
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")


class RotaryTable:
    """`cos` and `sin`, each [rows, dims] in the model's dtype; angles are taken in fp32 (or float64)."""

    def __init__(self, scheme: PositionScheme, rows: int, dtype: torch.dtype, device: str = "cpu") -> None:
        inverse = frequencies(scheme, wide(dtype))  # [dims / 2]
        cos, sin = [], []
        for first in range(0, rows, _BLOCK):
            angles = torch.arange(first, first + _BLOCK, dtype=inverse.dtype)[:, None] * inverse
            cos.append(torch.cat([angles.cos(), angles.cos()], -1).to(dtype))
            sin.append(torch.cat([-angles.sin(), angles.sin()], -1).to(dtype))
        self.cos = torch.cat(cos).to(device)
        self.sin = torch.cat(sin).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, dims], ready to broadcast over heads."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] rotated in its first `dims` entries; cos, sin [T, 1, dims]."""
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat([rotate(x[..., :dims], cos, sin), x[..., dims:]], -1)
    return torch.addcmul(x * cos, x.roll(dims // 2, -1), sin)


def frequencies(scheme: PositionScheme, dtype: torch.dtype) -> Tensor:
    """Angle per position of each rotary pair, [dims / 2]."""
    exponents = torch.arange(0, scheme.dims, 2, dtype=dtype) / scheme.dims
    inverse: Tensor = 1.0 / (scheme.theta**exponents)
    if scheme.scaling == "llama3":
        return _llama3(inverse, dict(scheme.scaling_parameters), scheme.original_max_positions)
    return inverse


def _llama3(inverse: Tensor, parameters: dict[str, float], original: int) -> Tensor:
    """Llama 3.1: slow rotations are divided by `factor`, fast ones kept, a linear blend between.

    A rotation is slow when fewer than `low_freq_factor` of its turns fit into the original
    context, and fast when more than `high_freq_factor` do.
    """
    factor, low, high = (parameters[key] for key in _LLAMA3_KEYS)
    wavelength = 2 * math.pi / inverse
    share = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - share) * inverse / factor + share * inverse
    return torch.where(share == 0, inverse / factor, torch.where(share == 1, inverse, blended))


def check_scheme(scheme: PositionScheme, head_dim: int) -> None:
    """Raises CheckpointError naming the position option that this engine cannot run."""
    if scheme.kind not in ("rope", "learned", "none"):
        raise _unsupported("positions.kind", scheme.kind, "rope, learned or none")
    if scheme.kind != "rope":
        return
    if scheme.scaling not in ("none", "llama3"):
        raise _unsupported("positions.scaling", scheme.scaling, "none or llama3")
    if scheme.interleaved:
        raise _unsupported("positions.interleaved", True, "rows of q and k reordered to half pairing by the loader")
    if not scheme.keys_cached_rotated:
        raise _unsupported("positions.keys_cached_rotated", False, "keys cached after rotation")
    if scheme.dims % 2 or not 0 < scheme.dims <= head_dim:
        raise _unsupported("positions.dims", scheme.dims, f"an even number from 2 to the head dim {head_dim}")
    if not (math.isfinite(scheme.theta) and scheme.theta > 0):
        raise _unsupported("positions.theta", scheme.theta, "a positive number")
    if scheme.scaling == "llama3":
        names = {name for name, _ in scheme.scaling_parameters}
        if names != set(_LLAMA3_KEYS) or scheme.original_max_positions < 1:
            found = f"{sorted(names)} with {scheme.original_max_positions} original positions"
            raise _unsupported("positions.scaling_parameters", found, f"exactly {', '.join(_LLAMA3_KEYS)}")


def _unsupported(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{value!r} is not supported",
        reason="UNSUPPORTED_POSITIONS",
        field=field,
        remedy=f"this engine runs {expected}",
    )
