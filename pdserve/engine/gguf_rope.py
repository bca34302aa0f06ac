"""How GGUF spells rotary positions.

The converter does not store llama3's four parameters: it stores the divisor of every
frequency, as the tensor rope_freqs.weight. Published models use one set of parameters with
different factors, so the divisors are recomputed and compared; others are refused. longrope's
two lists of factors are tensors as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.hf_rope import llama3
from pdserve.engine.rope_scaling import longrope_parameters
from pdserve.engine.stored import StoredTensor
from pdserve.errors import CheckpointError

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of every published llama3-scaled model
FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({FREQS, _SHORT, _LONG})


def gguf_rope_scheme(
    fields: Fields,
    arch: str,
    head_dim: int,
    context: int,
    partial: bool,
    truncate: bool,
    stored: Mapping[str, StoredTensor],
) -> PositionScheme:
    """Takes the rotary keys, and the tensors of divisors if the file has them. truncate: of yarn's ramp.

    Raises CheckpointError for partial rotary in a family that has none, other scalings than linear and yarn, and
    divisors that are not llama3's.
    """
    prefix = f"{arch}.rope"
    theta = fields.number(f"{prefix}.freq_base", 10000.0)
    dims = fields.integer(f"{prefix}.dimension_count", head_dim)
    if not partial:
        fields.expect(f"{prefix}.dimension_count", (head_dim,))
    original = fields.integer(f"{prefix}.scaling.original_context_length", 0)
    kind = fields.text(f"{prefix}.scaling.type", "none")
    # A context beyond the original one needs some scaling.
    if _LONG in stored or _SHORT in stored or (kind == "none" and 0 < original < context):
        return _longrope(fields, prefix, theta, dims, original, stored)
    if kind == "none":
        fields.expect(f"{prefix}.scaling.factor", (1, 1.0))
    fields.expect(f"{prefix}.scaling.type", ("none", "linear", "yarn"))
    fields.expect(f"{prefix}.scaling.finetuned", (False, True))
    fields.expect(f"{prefix}.scaling.attn_factor", (1, 1.0))
    fields.expect(f"{prefix}.scale_linear", (1, 1.0))
    if FREQS in stored:
        return _llama3(theta, dims, stored[FREQS].read(torch.float32).flatten())
    if kind == "none":
        return PositionScheme(kind="rope", theta=theta, dims=dims)
    factor = fields.number(f"{prefix}.scaling.factor")
    parameters = {"factor": factor}
    if kind == "yarn":
        if not original:
            raise fields.missing(f"{prefix}.scaling.original_context_length")
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            parameters[name] = single(fields.number(f"{prefix}.scaling.yarn_{name}", usual))
        parameters |= {"attention_factor": growth, "truncate": float(truncate)}
    return _scheme(theta, dims, kind, parameters, original if kind == "yarn" else 0)


def single(value: float) -> float:
    """The shortest decimal of a stored single: 9.999999747378752e-06 was written as 1e-05.

    So a GGUF and a config.json of one model give one spec.
    """
    return float(str(np.float32(value)))


def _scheme(theta: float, dims: int, scaling: str, parameters: Mapping[str, float], original: int) -> PositionScheme:
    return PositionScheme(
        kind="rope",
        theta=theta,
        dims=dims,
        scaling=scaling,
        scaling_parameters=tuple(parameters.items()),
        original_max_positions=original,
    )


def _longrope(
    fields: Fields, prefix: str, theta: float, dims: int, original: int, stored: Mapping[str, StoredTensor]
) -> PositionScheme:
    if not original:
        raise fields.missing(f"{prefix}.scaling.original_context_length")
    factors = []
    for name in (_SHORT, _LONG):
        if name not in stored or stored[name].shape != (dims // 2,):
            raise CheckpointError(
                f"tensor {name} must hold {dims // 2} factors", field=name, reason="MISSING_TENSOR",
                remedy="the checkpoint is incomplete; fetch it again",
            )  # fmt: skip
        factors.append([float(value) for value in stored[name].read(torch.float32)])
    attention = fields.number(f"{prefix}.scaling.attn_factor")
    return _scheme(theta, dims, "longrope", longrope_parameters(factors[0], factors[1], attention), original)


def _llama3(theta: float, dims: int, factors: Tensor) -> PositionScheme:
    scheme = llama3(
        theta,
        dims,
        {"factor": float(factors.max()), "low_freq_factor": _LOW, "high_freq_factor": _HIGH},
        _ORIGINAL,
    )
    if not _matches(scheme, factors):
        raise CheckpointError(
            f"{FREQS} holds other factors than llama3's standard ones",
            field=FREQS,
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
