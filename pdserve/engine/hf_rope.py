"""How configurations spell rotary positions, turned into a PositionScheme.

Two spellings are in use: `rope_theta` beside a `rope_scaling` object, and one
`rope_parameters` object that holds both. Inside, the kind is `rope_type` or `type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.errors import CheckpointError

# The peer's default for configurations older than the key.
_DEFAULT_THETA = 10000.0
_LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor")


def rope_scheme(fields: Fields, dims: int) -> PositionScheme:
    """Takes the rotary keys from `fields`; `dims` is the head dim, all of which is rotated.

    Raises CheckpointError for another scaling than default and llama3, for partial rotary,
    for two values of theta that differ, and for unknown keys inside the objects.
    """
    scaling = _merged(fields)
    theta = fields.number("rope_theta", scaling.number("rope_theta", _DEFAULT_THETA))
    if "rope_theta" in scaling and scaling.number("rope_theta") != theta:
        raise fields.unsupported("rope_theta", theta, f"rope_parameters has {scaling.number('rope_theta')}")
    scaling.expect("partial_rotary_factor", (1, 1.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    scaling.expect("type", (kind,))
    if kind == "default":
        scheme = PositionScheme(kind="rope", theta=theta, dims=dims)
    elif kind == "llama3":
        scheme = llama3(
            theta,
            dims,
            {name: scaling.number(name) for name in _LLAMA3},
            scaling.integer("original_max_position_embeddings"),
        )
    else:
        raise CheckpointError(
            f"rotary positions of type {kind} are not supported",
            field="rope_type",
            reason="UNKNOWN_ROPE_TYPE",
            remedy="supported are default and llama3",
        )
    scaling.finish(lambda key: False)
    return scheme


def llama3(theta: float, dims: int, parameters: Mapping[str, float], original: int) -> PositionScheme:
    """Frequencies below a wavelength are kept, those above another divided by `factor`, smoothly in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if high <= low:
        raise CheckpointError(
            f"high_freq_factor {high} must exceed low_freq_factor {low}",
            field="high_freq_factor",
            reason="BAD_VALUE",
        )
    return PositionScheme(
        kind="rope",
        theta=theta,
        dims=dims,
        scaling="llama3",
        scaling_parameters=tuple(sorted(parameters.items())),
        original_max_positions=original,
    )


def _merged(fields: Fields) -> Fields:
    found: list[tuple[str, Any]] = [
        (key, fields.take(key)) for key in ("rope_parameters", "rope_scaling") if key in fields
    ]
    for key, value in found:
        if not isinstance(value, dict):
            raise fields.unsupported(key, value, "expected an object")
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise fields.unsupported("rope_scaling", found[1][1], "it differs from rope_parameters")
    return Fields(found[0][1] if found else {}, found[0][0] if found else "rope_parameters")
