"""How configurations spell rotary positions, turned into a PositionScheme.

Two spellings are in use: `rope_theta` beside a `rope_scaling` object, and one
`rope_parameters` object that holds both. Inside, the kind is `rope_type` or `type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.rope_scaling import longrope_parameters, proportional
from pdserve.errors import CheckpointError

_LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeKeys:
    """What a family calls its rotary options, and what they are where a configuration lacks them."""

    theta: str = "rope_theta"
    default_theta: float = 10000.0
    partial: str = ""  # key of the share of a head that is rotated; "": the whole head, always
    default_partial: float = 1.0
    dims: str = ""  # key of the number of values of a head that are rotated, which some configurations have instead
    default_original: int = 0  # positions of the original context; 0: those of the model
    aliases: Mapping[str, str] = field(default_factory=dict)  # older names of scalings
    scalings: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_object(fields: Fields) -> Fields:
    """What stands in rope_parameters or rope_scaling, whichever is there; both must say the same."""
    found: list[tuple[str, Any]] = [
        (key, fields.take(key)) for key in ("rope_parameters", "rope_scaling") if key in fields
    ]
    for key, value in found:
        if not isinstance(value, dict):
            raise fields.unsupported(key, value, "expected an object")
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise fields.unsupported("rope_scaling", found[1][1], "it differs from rope_parameters")
    return Fields(found[0][1] if found else {}, found[0][0] if found else "rope_parameters")


def read_scheme(fields: Fields, scaling: Fields, keys: RopeKeys, head_dim: int, context: int) -> PositionScheme:
    """One scheme from a configuration and its rotary object; `context` is the number of positions of the model.

    Takes the keys. Raises CheckpointError for an unknown scaling, for two places that say different things, and for
    unknown keys inside the object.
    """
    theta = _either(fields, scaling, keys.theta, "rope_theta", keys.default_theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    scaling.expect("type", (kind,))
    kind = keys.aliases.get(kind, kind)
    if kind not in keys.scalings:
        raise CheckpointError(
            f"rotary positions of type {kind} are not supported",
            field="rope_type",
            reason="UNKNOWN_ROPE_TYPE",
            remedy=f"supported are {', '.join(keys.scalings)}",
        )
    if kind == "proportional":
        return _proportional(scaling, theta, head_dim)
    dims = _dims(fields, scaling, keys, head_dim)
    original = _original(fields, scaling, keys, kind, context)
    parameters = _PARAMETERS[kind](scaling, original, context, dims)
    scaling.finish(lambda key: False)
    return PositionScheme(
        kind="rope",
        theta=theta,
        dims=dims,
        scaling="none" if kind == "default" else kind,
        scaling_parameters=tuple(sorted(parameters.items())),
        original_max_positions=original,
    )


def llama3(theta: float, dims: int, parameters: Mapping[str, float], original: int) -> PositionScheme:
    """Frequencies below a wavelength are kept, those above another divided by `factor`, smoothly in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if high <= low:
        raise CheckpointError(
            f"high_freq_factor {high} must exceed low_freq_factor {low}",
            field="high_freq_factor",
            reason="BAD_VALUE",
            remedy="correct the rope parameters, or get the model's files again",
        )
    return PositionScheme(
        kind="rope",
        theta=theta,
        dims=dims,
        scaling="llama3",
        scaling_parameters=tuple(sorted(parameters.items())),
        original_max_positions=original,
    )


def _proportional(scaling: Fields, theta: float, head_dim: int) -> PositionScheme:
    share, factor = scaling.number("partial_rotary_factor", 1.0), scaling.number("factor", 1.0)
    rotated = int(share * head_dim // 2)
    if not 1 <= rotated <= head_dim // 2:
        raise scaling.unsupported("partial_rotary_factor", share, f"it rotates {rotated} pairs of a head of {head_dim}")
    scaling.finish(lambda key: False)
    return proportional(theta, head_dim, rotated, factor)


def _either(fields: Fields, scaling: Fields, key: str, inner: str, default: float) -> float:
    """A number beside the object or inside it; where both are, they must agree."""
    value = fields.number(key, scaling.number(inner, default))
    if inner in scaling and scaling.number(inner) != value:
        raise fields.unsupported(key, value, f"the rotary object has {inner} {scaling.number(inner)}")
    return value


def _dims(fields: Fields, scaling: Fields, keys: RopeKeys, head_dim: int) -> int:
    if not keys.partial:
        for place in (fields, scaling):
            place.expect("partial_rotary_factor", (1, 1.0))
        return head_dim
    share = _either(fields, scaling, keys.partial, "partial_rotary_factor", keys.default_partial)
    dims = int(head_dim * share)
    if not keys.dims or keys.dims not in fields:
        return dims
    rotated = fields.integer(keys.dims, maximum=head_dim)
    if rotated != dims and (keys.partial in fields or "partial_rotary_factor" in scaling):
        raise fields.unsupported(keys.dims, rotated, f"{keys.partial} makes it {dims}")
    return rotated


def _original(fields: Fields, scaling: Fields, keys: RopeKeys, kind: str, context: int) -> int:
    """Positions of the original context; 0 where the scaling has none."""
    beside = fields.integer(_ORIGINAL, keys.default_original or None)
    if kind in ("default", "linear"):
        return 0
    if kind == "dynamic":
        return context
    if kind == "llama3" and not beside:
        return scaling.integer(_ORIGINAL)
    original = scaling.integer(_ORIGINAL, beside or context)
    if beside and original != beside:
        raise fields.unsupported(_ORIGINAL, beside, f"the rotary object has {original}")
    return beside or original


def _factor(scaling: Fields, original: int, context: int, dims: int) -> dict[str, float]:
    return {"factor": scaling.number("factor")}


def _llama3(scaling: Fields, original: int, context: int, dims: int) -> dict[str, float]:
    parameters = {name: scaling.number(name) for name in _LLAMA3}
    return dict(llama3(1.0, dims, parameters, original).scaling_parameters)


def _yarn(scaling: Fields, original: int, context: int, dims: int) -> dict[str, float]:
    factor = scaling.number("factor", context / original)
    scale, whole = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    inferred = growth(scale) / growth(whole) if scale and whole else growth(1.0)
    return {
        "factor": factor,
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "attention_factor": scaling.number("attention_factor", inferred),
        "truncate": float(scaling.flag("truncate", True)),
    }


def _longrope(scaling: Fields, original: int, context: int, dims: int) -> dict[str, float]:
    factor = scaling.number("factor", context / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = scaling.numbers("short_factor", dims // 2), scaling.numbers("long_factor", dims // 2)
    return longrope_parameters(short, long, scaling.number("attention_factor", inferred))


_PARAMETERS: Mapping[str, Callable[[Fields, int, int, int], dict[str, float]]] = {
    "default": lambda scaling, original, context, dims: {},
    "linear": _factor,
    "dynamic": _factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
