"""How configurations tell layers apart: windows, positions and experts that only some have.

Each function here takes the keys it needs and gives the ModelSpec fields that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.family import Family
from pdserve.engine.fields import Fields
from pdserve.engine.hf_gemma4 import gemma4_fields
from pdserve.engine.lfm2 import hf_fields

Read = Mapping[str, Any]  # what was read before: layers, positions, head_dim, context_limit
_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_fields(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """sliding_window, layer_positions and dense_layers, as far as the family has them; Falcon's other fields."""
    return _READERS[family.layers](family, fields, read)


def _none(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    return {}


def _one_window(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    if not fields.names("sliding_window"):  # null means none, but the peer's default is a window
        raise fields.missing("sliding_window")
    return _window_if_any(family, fields, read)


def _window_if_any(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    window = fields.integer("sliding_window", None)
    return {"sliding_window": (window,) * read["layers"] if window else ()}


def _upper_windows(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """Off unless use_sliding_window; then layer_types, else all layers from max_window_layers on."""
    layers, window = read["layers"], _switched_window(fields)
    first = fields.integer("max_window_layers", layers, minimum=0)
    types = _types(fields, [_SLIDING if window and i >= first else _FULL for i in range(layers)])
    return {"sliding_window": _windows(fields, types, window)}


def _typed(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """layer_types, else every `pattern`-th layer sees everything; perhaps with positions of their own."""
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", family.pattern))
    default = [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(read["layers"])]
    types = _types(fields, default)
    found: dict[str, Any] = {"sliding_window": _windows(fields, types, fields.integer("sliding_window", None))}
    if family.local_rope is not None and _SLIDING in types:
        local = read["local_positions"]
        found["layer_positions"] = tuple(local if t == _SLIDING else read["positions"] for t in types)
    return found


def _some_without_positions(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """no_rope_layers holds 0 for a layer without positions; by default that is every fourth."""
    layers, window = read["layers"], _switched_window(fields)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.take("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(rotated, list) or len(rotated) != layers or not all(item in (0, 1) for item in rotated):
        raise fields.unsupported("no_rope_layers", rotated, f"expected 0 or 1 for each of {layers} layers")
    types = _types(fields, [_SLIDING if window and not rotates else _FULL for rotates in rotated])
    none = PositionScheme(kind="none")
    return {
        "sliding_window": _windows(fields, types, window),
        "layer_positions": () if all(rotated) else tuple(read["positions"] if r else none for r in rotated),
    }


def _some_dense(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """Experts in some layers; a window everywhere or nowhere."""
    window = _switched_window(fields)
    fields.take("max_window_layers", None)  # in many files; the peer does not read it
    return {"sliding_window": (window,) * read["layers"] if window else (), "dense_layers": _dense(fields, read)}


def _some_dense_without_windows(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    fields.expect("use_sliding_window", (False,))
    for key in ("sliding_window", "max_window_layers"):  # without effect then
        fields.take(key, None)
    _windows(fields, _types(fields, [_FULL] * read["layers"]), None)
    return {"dense_layers": _dense(fields, read)}


def _dense(fields: Fields, read: Read) -> tuple[int, ...]:
    """Layers without experts: these are in every `decoder_sparse_step`-th layer but those of mlp_only_layers."""
    layers = read["layers"]
    step, only = fields.integer("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    if not isinstance(only, list) or not all(isinstance(i, int) and 0 <= i < layers for i in only):
        raise fields.unsupported("mlp_only_layers", only, f"expected numbers of {layers} layers")
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)


def _two_layouts(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    """Falcon's first layout: one norm, and one key for all heads or one for each. The newer: groups, and two norms."""
    newer, norms = fields.flag("new_decoder_architecture", False), "num_ln_in_parallel_attn"
    found = fields.integer(norms, 2 if newer else 1, maximum=2)
    if found == 2 and not newer:
        raise fields.unsupported(norms, found, "two norms need new_decoder_architecture")
    one_key = fields.flag("multi_query", True) and not newer
    kv_heads = fields.integer("num_kv_heads", read["heads"])  # without effect if there is one
    return {"kv_heads": 1 if one_key else kv_heads, "one_norm": found == 1}


def _convolutions(family: Family, fields: Fields, read: Read) -> dict[str, Any]:
    return hf_fields(fields, read)


def _switched_window(fields: Fields) -> int | None:
    window: int | None = fields.integer("sliding_window", None)
    if not fields.flag("use_sliding_window", False):
        return None
    if window is None:
        raise fields.missing("sliding_window")
    return window


def _types(fields: Fields, default: list[str]) -> list[str]:
    types = fields.take("layer_types", default)
    if not isinstance(types, list) or len(types) != len(default) or not all(t in (_FULL, _SLIDING) for t in types):
        remedy = f"expected full_attention or sliding_attention for {len(default)} layers"
        raise fields.unsupported("layer_types", types, remedy)
    return types


def _windows(fields: Fields, types: list[str], window: int | None) -> tuple[int, ...]:
    """Tokens seen per layer; () if no layer has a window."""
    if _SLIDING not in types:
        return ()
    if not window:
        raise fields.unsupported("layer_types", types, "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(window if t == _SLIDING else 0 for t in types)


_READERS: Mapping[str, Callable[[Family, Fields, Read], dict[str, Any]]] = {
    "none": _none,
    "one window": _one_window,
    "window if any": _window_if_any,
    "upper windows": _upper_windows,
    "types": _typed,
    "some without positions": _some_without_positions,
    "some dense": _some_dense,
    "some dense, no windows": _some_dense_without_windows,
    "two layouts": _two_layouts,
    "convolutions": _convolutions,
    "gemma4": lambda family, fields, read: gemma4_fields(fields, read),
}
