"""How a configuration of Gemma 4 tells its layers apart: shapes, positions, windows, shared caches, wider MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.hf_rope import RopeKeys, read_scheme, rope_object
from pdserve.engine.spec import LayerShape, shape_fields

FULL, SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6
_GLOBAL_HEAD_DIM = 512  # where nothing is said
_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_ROPE_KEYS = RopeKeys(scalings=("default", "linear", "proportional"))
_KEYS_OF_EXPERTS = {
    "experts": "num_experts",
    "active_experts": "top_k_experts",
    "expert_width": "moe_intermediate_size",
}


def gemma4_fields(fields: Fields, read: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelSpec fields that follow; `read` holds what was read before: sizes, head_dim, context_limit.

    Raises CheckpointError naming the key that is missing, wrong or contradicts another.
    """
    types = layer_types(fields, read["layers"])
    shapes = _shapes(fields, read, types)
    own = read["layers"] - _shared(fields, read["layers"])  # layers that make K and V of their own
    sources = kv_sources(fields, "num_kv_shared_layers", types, own)
    equal_keys = fields.flag("attention_k_eq_v", False)
    window = fields.integer("sliding_window")
    return {
        **shape_fields(shapes),
        **_positions(fields, read, types, shapes),
        **_experts(fields),
        **_inputs(fields, read),
        "sliding_window": tuple(window if t == SLIDING else 0 for t in types) if SLIDING in types else (),
        "kv_layers": sources if own < read["layers"] else (),
        "key_is_value": tuple(i for i in range(own) if types[i] == FULL) if equal_keys else (),
        "layer_ffn": _widths(fields, read, own),
    }


def layer_types(fields: Fields, layers: int) -> list[str]:
    default = [SLIDING if (i + 1) % _PATTERN and i < layers - 1 else FULL for i in range(layers)]
    types = fields.take("layer_types", default)
    good = isinstance(types, list) and len(types) == layers and all(t in (FULL, SLIDING) for t in types)
    if not good or types[-1] != FULL:
        remedy = f"expected full_attention or sliding_attention for {layers} layers, the last of them full_attention"
        raise fields.unsupported("layer_types", types, remedy)
    return list(types)


def kv_sources(fields: Fields, key: str, types: Sequence[str], own: int) -> tuple[int, ...]:
    """Whose K and V each layer reads: from layer `own` on (`key` says it) the last one's of its type that has any."""
    missing = set(types[own:]) - set(types[:own])
    if missing:
        number = len(types) - own
        raise fields.unsupported(key, number, f"no layer before them has {missing.pop()}")
    last = {t: max(i for i in range(own) if types[i] == t) for t in set(types[:own])}
    return tuple(i if i < own else last[t] for i, t in enumerate(types))


def _shared(fields: Fields, layers: int) -> int:
    shared: int = fields.integer("num_kv_shared_layers", 0, minimum=0)
    if shared >= layers:
        raise fields.unsupported("num_kv_shared_layers", shared, f"a cache is made in at least one of {layers} layers")
    return shared


def _shapes(fields: Fields, read: Mapping[str, Any], types: Sequence[str]) -> list[LayerShape]:
    """Layers that see everything have heads of their own: listed by layer, or the same for all of them."""
    plain = {"num_key_value_heads": read["kv_heads"], "head_dim": read["head_dim"]}
    wide = {"head_dim": fields.integer("global_head_dim", _GLOBAL_HEAD_DIM)}
    heads = fields.integer("num_global_key_value_heads", None)
    if heads is not None and fields.flag("attention_k_eq_v", False):
        wide["num_key_value_heads"] = heads
    if "per_layer_config" in fields:
        changes = _by_layer(fields, len(types))
    else:
        changes = {i: wide for i, t in enumerate(types) if t == FULL}
    found = [{**plain, **changes.get(i, {})} for i in range(len(types))]
    return [LayerShape(read["heads"], layer["num_key_value_heads"], layer["head_dim"]) for layer in found]


def _by_layer(fields: Fields, layers: int) -> dict[int, dict[str, int]]:
    key = "per_layer_config"
    given, numbers = fields.take(key), {str(i): i for i in range(layers)}
    if not isinstance(given, dict) or not all(name in numbers and isinstance(own, dict) for name, own in given.items()):
        raise fields.unsupported(key, given, f"expected objects for numbers of {layers} layers")
    changes = {}
    for name, own in given.items():
        inner = Fields(own, f"{key}.{name}")
        changes[numbers[name]] = {
            size: inner.integer(size) for size in ("head_dim", "num_key_value_heads") if size in inner
        }
        inner.finish(lambda key: False)
    return changes


def _positions(
    fields: Fields, read: Mapping[str, Any], types: Sequence[str], shapes: Sequence[LayerShape]
) -> dict[str, Any]:
    """A scheme for each type of layer, in heads of its size."""
    stands, schemes = rope_object(fields), {}
    given = any(kind in stands for kind in _ROPE)
    for kind, default in _ROPE.items():
        own = Fields(stands.take(kind, {}) if given else default, f"rope_parameters.{kind}")
        if kind in types:
            head_dim = {shape.head_dim for shape, t in zip(shapes, types, strict=True) if t == kind}
            if len(head_dim) > 1:
                raise fields.unsupported("per_layer_config", sorted(head_dim), f"one head_dim in all {kind} layers")
            schemes[kind] = read_scheme(Fields({}, kind), own, _ROPE_KEYS, head_dim.pop(), read["context_limit"])
    stands.finish(lambda key: False)
    by_layer: tuple[PositionScheme, ...] = tuple(schemes[t] for t in types)
    return {"positions": by_layer[0], "layer_positions": by_layer if len(set(by_layer)) > 1 else ()}


def _experts(fields: Fields) -> dict[str, Any]:
    if not fields.flag("enable_moe_block", False):
        for key in _KEYS_OF_EXPERTS.values():  # without effect then
            fields.take(key, None)
        return {}
    sizes = {name: fields.integer(key) for name, key in _KEYS_OF_EXPERTS.items()}
    return {**sizes, "norm_experts": True, "experts_beside": True}


def _inputs(fields: Fields, read: Mapping[str, Any]) -> dict[str, int]:
    key, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    if not fields.names(key):  # null means none, but the peer's default is 256
        raise fields.missing(key)
    width: int = fields.integer(key, 0, minimum=0)
    if width:
        fields.expect(rows, (read["vocab_size"],))
    fields.take(rows, None)
    return {"layer_input_width": width}


def _widths(fields: Fields, read: Mapping[str, Any], own: int) -> tuple[int, ...]:
    """Layers without K and V of their own may have an MLP of twice the width."""
    layers, width = read["layers"], read["ffn_width"]
    if not fields.flag("use_double_wide_mlp", False) or own == layers:
        return ()
    return tuple(width if i < own else 2 * width for i in range(layers))
