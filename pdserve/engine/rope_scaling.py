"""How a rotary scaling changes frequencies, as `PositionScheme.scaling` and its parameters state it.

    none       angle per position of pair i: theta ^ (-2i / dims)
    linear     all divided by `factor`
    dynamic    theta grows with the sequence beyond `original_max_positions`. A cached key would then be of another
               theta than the query, so sequences end there; before, it is `none`.
    llama3     slow ones divided by `factor`, fast ones kept, a blend between; by turns in the original context
    yarn       the same idea with a ramp over the pairs; cos and sin are multiplied by `attention_factor` as well
    longrope   pair i divided by a factor of its own: `short.i`, or `long.i` where `long` is 1, which is for sequences
               beyond the original context; cos and sin are multiplied by `attention_factor`
    proportional  the first `rotated` pairs keep their angles, divided by `factor`; the others do not turn

Whether `long` holds is settled when a model is loaded (`within`): every key of a cache has the same frequencies,
however long its sequence grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "proportional": ("factor", "rotated"),
}
_PLAIN = ("none", "linear", "proportional")  # without an original context
SCALINGS = (*_PARAMETERS, "longrope")


def longrope_parameters(short: Sequence[float], long: Sequence[float], attention_factor: float) -> dict[str, float]:
    """`long` is left at 0: short sequences."""
    own = {"attention_factor": attention_factor, "long": 0.0}
    own |= {f"short.{i:03}": value for i, value in enumerate(short)}
    return own | {f"long.{i:03}": value for i, value in enumerate(long)}


def proportional(theta: float, dims: int, rotated: int, factor: float = 1.0) -> PositionScheme:
    """Of the pairs of a head only the first `rotated` turn. Where all do, it is a scheme that has another name."""
    plain = PositionScheme(kind="rope", theta=theta, dims=dims)
    if rotated < dims // 2:
        return replace(plain, scaling="proportional", scaling_parameters=(("factor", factor), ("rotated", rotated)))
    return plain if factor == 1.0 else replace(plain, scaling="linear", scaling_parameters=(("factor", factor),))


def within(spec: ModelSpec, limit: int) -> ModelSpec:
    """The spec where sequences have at most `limit` tokens (0: as many as the model is defined for).

    A longrope model gets its short factors if none can go beyond the original context, else its long ones.
    """
    limit = min(limit or spec.context_limit, spec.context_limit)

    def fitted(scheme: PositionScheme) -> PositionScheme:
        if scheme.scaling != "longrope":
            return scheme
        chosen = {**dict(scheme.scaling_parameters), "long": float(limit > scheme.original_max_positions)}
        return replace(scheme, scaling_parameters=tuple(chosen.items()))

    layers = tuple(fitted(scheme) for scheme in spec.layer_positions)
    return replace(spec, context_limit=limit, positions=fitted(spec.positions), layer_positions=layers)


def attention_factor(scheme: PositionScheme) -> float:
    """What cos and sin are multiplied by."""
    return dict(scheme.scaling_parameters).get("attention_factor", 1.0)


def frequencies(scheme: PositionScheme, dtype: torch.dtype) -> Tensor:
    """Angle per position of each rotary pair, [dims / 2]."""
    parameters, original = dict(scheme.scaling_parameters), scheme.original_max_positions
    exponents = torch.arange(0, scheme.dims, 2, dtype=dtype) / scheme.dims
    inverse: Tensor = 1.0 / (scheme.theta**exponents)
    if scheme.scaling == "linear":
        return inverse / parameters["factor"]
    if scheme.scaling == "proportional":
        turns = torch.arange(scheme.dims // 2) < parameters["rotated"]
        return torch.where(turns, inverse / parameters["factor"], torch.zeros_like(inverse))
    if scheme.scaling == "llama3":
        return _llama3(inverse, parameters, original)
    if scheme.scaling == "yarn":
        return _yarn(inverse, scheme, parameters)
    if scheme.scaling == "longrope":
        which = "long" if parameters["long"] else "short"
        factors = [parameters[f"{which}.{i:03}"] for i in range(scheme.dims // 2)]
        return 1.0 / (torch.tensor(factors, dtype=dtype) * scheme.theta**exponents)
    return inverse


def _llama3(inverse: Tensor, parameters: Mapping[str, float], original: int) -> Tensor:
    """A rotation is slow when fewer than `low_freq_factor` of its turns fit into the original
    context, and fast when more than `high_freq_factor` do.
    """
    factor, low, high = (parameters[key] for key in _LLAMA3)
    wavelength = 2 * math.pi / inverse
    share = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - share) * inverse / factor + share * inverse
    return torch.where(share == 0, inverse / factor, torch.where(share == 1, inverse, blended))


def _yarn(inverse: Tensor, scheme: PositionScheme, parameters: Mapping[str, float]) -> Tensor:
    """Pairs that turn more than `beta_fast` times in the original context are kept, those that turn less than
    `beta_slow` times divided; a straight ramp between (YaRN, section 3.2). `truncate`: its ends are whole pairs.
    """

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so often."""
        at = scheme.original_max_positions / (turns * 2 * math.pi)
        return scheme.dims * math.log(at) / (2 * math.log(scheme.theta))

    low, high = pair(parameters["beta_fast"]), pair(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scheme.dims - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(scheme.dims // 2, dtype=inverse.dtype) - low) / (high - low)).clamp(0.0, 1.0)
    return inverse / parameters["factor"] * divided + inverse * (1 - divided)


def check_scaling(scheme: PositionScheme) -> None:
    """Raises CheckpointError for a scaling that is unknown, or whose parameters are not exactly those it has."""
    if scheme.scaling not in SCALINGS:
        raise _unsupported("positions.scaling", scheme.scaling, ", ".join(SCALINGS))
    names = set(_PARAMETERS.get(scheme.scaling, ()))
    if scheme.scaling == "longrope":
        names = set(longrope_parameters([1.0] * (scheme.dims // 2), [1.0] * (scheme.dims // 2), 1.0))
    found = dict(scheme.scaling_parameters)
    if set(found) != names or not all(math.isfinite(value) and value >= 0 for value in found.values()):
        raise _unsupported("positions.scaling_parameters", sorted(found), f"exactly {', '.join(sorted(names))}")
    if any(not value for name, value in found.items() if name not in ("long", "truncate")):
        raise _unsupported("positions.scaling_parameters", 0.0, "factors above 0")
    if scheme.scaling not in _PLAIN and scheme.original_max_positions < 1:
        wanted = f"{scheme.scaling} with the positions of the original context"
        raise _unsupported("positions.original_max_positions", scheme.original_max_positions, wanted)


def _unsupported(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{value!r} is not supported",
        reason="UNSUPPORTED_POSITIONS",
        field=field,
        remedy=f"this engine runs {expected}",
    )
