"""How GGUF spells rotary positions.

The converter does not store llama3's four parameters: it stores the divisor of every
frequency, as the tensor rope_freqs.weight. Published models use one set of parameters with
different factors, so the divisors are recomputed and compared; others are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.hf_rope import llama3
from pdserve.errors import CheckpointError

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of every published llama3-scaled model


def gguf_rope_scheme(fields: Fields, arch: str, head_dim: int, factors: Tensor | None) -> PositionScheme:
    """Takes the rotary keys; `factors` is rope_freqs.weight [head_dim / 2] if the file has it.

    Raises CheckpointError for partial rotary, other scalings, and factors that are not llama3's.
    """
    prefix = f"{arch}.rope"
    theta = fields.number(f"{prefix}.freq_base", 10000.0)
    fields.expect(f"{prefix}.dimension_count", (head_dim,))
    fields.expect(f"{prefix}.scaling.type", ("none",))
    fields.expect(f"{prefix}.scaling.factor", (1, 1.0))
    fields.expect(f"{prefix}.scale_linear", (1, 1.0))
    if factors is None:
        return PositionScheme(kind="rope", theta=theta, dims=head_dim)
    scheme = llama3(
        theta,
        head_dim,
        {"factor": float(factors.max()), "low_freq_factor": _LOW, "high_freq_factor": _HIGH},
        _ORIGINAL,
    )
    if not _matches(scheme, factors):
        raise CheckpointError(
            "rope_freqs.weight holds other factors than llama3's standard ones",
            field="rope_freqs.weight",
            reason="UNKNOWN_ROPE_TYPE",
            remedy="load the model from its Hugging Face directory, where the parameters are given",
        )
    return scheme


def _matches(scheme: PositionScheme, factors: Tensor) -> bool:
    expected = llama3_divisors(scheme)
    return factors.shape == expected.shape and torch.allclose(factors.double(), expected, rtol=1e-5)


def llama3_divisors(scheme: PositionScheme) -> Tensor:
    """[dims / 2]: what each rotary frequency is divided by, in float64."""
    p = dict(scheme.scaling_parameters)
    pairs = torch.arange(0, scheme.dims, 2, dtype=torch.float64)
    wavelength = 2 * math.pi * scheme.theta ** (pairs / scheme.dims)
    turns = scheme.original_max_positions / wavelength  # over the original context
    smooth = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    blended = 1 / ((1 - smooth) / p["factor"] + smooth)
    kept, divided = torch.ones_like(turns), torch.full_like(turns, p["factor"])
    middle = torch.where(turns < p["low_freq_factor"], divided, blended)
    return torch.where(turns > p["high_freq_factor"], kept, middle)
