"""Every must-equal field of a worker's contract, changed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from cache_transfer.contract import AttentionScheme, CachePlane, PositionScheme, WorkerContract

Change = Callable[[WorkerContract], WorkerContract]

CONVERTIBLE = {"page_size", "page_axis_order", "device"}
LOSSY = {"kv_dtype", "weight_dtype", "activation_dtype"}
INFORMATIONAL = {"context_limit", "info", "allow_lossy"}

# What every test contract gets where it differs from a rotary model without a tokenizer.
_POSITIONS: dict[str, Any] = {
    "kind": "alibi",
    "theta": 10000.5,
    "dims": 4,
    "scaling": "llama3",
    "scaling_parameters": (("factor", 8.0),),
    "original_max_positions": 8192,
    "interleaved": True,
    "keys_cached_rotated": False,
}
_ATTENTION: dict[str, Any] = {"scale": 0.25, "soft_cap": 50.0, "sliding_window": (16, 0, 0)}


def _plain(name: str, value: Any) -> Change:
    return lambda contract: replace(contract, **{name: value})


def _position(name: str) -> Change:
    return lambda c: replace(c, positions=replace(c.positions, **{name: _POSITIONS[name]}))


def _attention(name: str) -> Change:
    return lambda c: replace(c, attention=replace(c.attention, **{name: _ATTENTION[name]}))


def _plane(layer: int, index: int, **changes: Any) -> Change:
    def change(contract: WorkerContract) -> WorkerContract:
        planes = [list(each) for each in contract.planes]
        planes[layer][index] = replace(planes[layer][index], **changes)
        return replace(contract, planes=tuple(tuple(each) for each in planes))

    return change


def _extra_plane(contract: WorkerContract) -> WorkerContract:
    first, *others = contract.planes
    return replace(contract, planes=((*first, CachePlane("index", 1, 8)), *others))


def _one_layer_less(contract: WorkerContract) -> WorkerContract:
    # A contract lists the window of every layer, so a layer that is missing misses there too.
    windows = contract.attention.sliding_window[:-1]
    return replace(contract, planes=contract.planes[:-1], attention=replace(contract.attention, sliding_window=windows))


# The code that the diff must name -> the change.
CHANGES: dict[str, Change] = {
    "CONTRACT_VERSION": _plain("version", 2),
    "MODEL_DIGEST": _plain("model_digest", b"x" * 32),
    **{f"POSITION_SCHEME.{f.name}": _position(f.name) for f in fields(PositionScheme)},
    "LAYER_POSITIONS[1]": lambda c: replace(c, layer_positions=(c.positions,) * len(c.planes)),
    **{f"ATTENTION.{f.name}": _attention(f.name) for f in fields(AttentionScheme)},
    "LAYERS": _one_layer_less,
    "PLANES[0]": _extra_plane,
    "PLANES[2].k.heads": _plane(2, 0, heads=4),
    "PLANES[1].k.head_dim": _plane(1, 0, head_dim=16),
    "PLANES[0].v.heads": _plane(0, 1, heads=1),
    "PLANES[2].v.head_dim": _plane(2, 1, head_dim=4),
    "VOCAB_SIZE": _plain("vocab_size", 98),
    "TOKENIZER_DIGEST": _plain("tokenizer_digest", b"t" * 32),
}
# Fields that cannot change without others, in the order of the diff.
TOGETHER = {
    "LAYER_POSITIONS[1]": ("LAYER_POSITIONS[0]", "LAYER_POSITIONS[1]", "LAYER_POSITIONS[2]"),
    "LAYERS": ("ATTENTION.sliding_window", "LAYERS", "PLANES[2]", "PLANES[2].k.heads", "PLANES[2].k.head_dim",
               "PLANES[2].v.heads", "PLANES[2].v.head_dim"),
    "PLANES[0]": ("PLANES[0]", "PLANES[0].index.heads", "PLANES[0].index.head_dim"),
}  # fmt: skip


def codes(code: str) -> tuple[str, ...]:
    """All codes that a change brings about."""
    return TOGETHER.get(code, (code,))
