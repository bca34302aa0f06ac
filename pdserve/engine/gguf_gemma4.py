"""How GGUF tells the layers of Gemma 4 apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine.gguf_metadata import Metadata, vocab_size
from pdserve.engine.gguf_rope import FREQS
from pdserve.engine.hf_gemma4 import FULL, SLIDING, kv_sources
from pdserve.engine.rope_scaling import proportional
from pdserve.engine.spec import LayerShape, shape_fields
from pdserve.engine.stored import StoredTensor
from pdserve.engine.validate import MAX_EXPERTS, MAX_LAYERS
from pdserve.errors import CheckpointError

_STILL = 1e29  # a pair whose frequency is divided by this or more does not turn; the converter writes 1e30


def gemma4_fields(fields: Metadata, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The ModelSpec fields that no table in gguf_families.py holds.

    Raises CheckpointError naming the key or tensor that is missing, wrong or contradicts another.
    """
    layers = fields.size("block_count", maximum=MAX_LAYERS)
    types = _types(fields, layers)
    own = layers - _shared(fields, layers)  # layers that make K and V of their own
    sources = kv_sources(fields, fields.key("attention.shared_kv_layers"), types, own)
    widths, window = fields.sizes("feed_forward_length", layers), fields.size("attention.sliding_window")
    shapes = _shapes(fields, types)
    return {
        "vocab_size": vocab_size(fields, stored),
        "width": fields.size("embedding_length"),
        "layers": layers,
        "context_limit": fields.size("context_length"),
        **shape_fields(shapes),
        **_positions(fields, types, shapes, stored),
        **_experts(fields),
        "ffn_width": widths[0],
        "layer_ffn": widths if len(set(widths)) > 1 else (),
        "sliding_window": tuple(window if t == SLIDING else 0 for t in types) if SLIDING in types else (),
        "kv_layers": sources if own < layers else (),
        "key_is_value": tuple(i for i in range(own) if f"blk.{i}.attn_v.weight" not in stored),
        "layer_input_width": fields.size("embedding_length_per_layer_input", 0, minimum=0),
        "logit_soft_cap": fields.number(fields.key("final_logit_softcapping"), 0.0),
    }


def _types(fields: Metadata, layers: int) -> list[str]:
    """A flag for each layer: whether it has a window."""
    key = fields.key("attention.sliding_window_pattern")
    flags = fields.take(key)
    if not isinstance(flags, list) or len(flags) != layers or not all(flag in (0, 1) for flag in flags):
        raise fields.unsupported(key, flags, f"expected true or false for each of {layers} layers")
    return [SLIDING if flag else FULL for flag in flags]


def _shared(fields: Metadata, layers: int) -> int:
    shared = fields.size("attention.shared_kv_layers", 0, minimum=0)
    if shared >= layers:
        key = fields.key("attention.shared_kv_layers")
        raise fields.unsupported(key, shared, f"a cache is made in at least one of {layers} layers")
    return shared


def _shapes(fields: Metadata, types: Sequence[str]) -> list[LayerShape]:
    heads, kv_heads = fields.size("attention.head_count"), fields.sizes("attention.head_count_kv", len(types))
    dims = {FULL: fields.size("attention.key_length")}
    fields.expect(fields.key("attention.value_length"), (dims[FULL],))
    if SLIDING in types:
        dims[SLIDING] = fields.size("attention.key_length_swa")
        fields.expect(fields.key("attention.value_length_swa"), (dims[SLIDING],))
    return [LayerShape(heads, own, dims[t]) for own, t in zip(kv_heads, types, strict=True)]


def _positions(
    fields: Metadata, types: Sequence[str], shapes: Sequence[LayerShape], stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    dims = dict(zip(types, (shape.head_dim for shape in shapes), strict=True))
    thetas = {
        FULL: fields.number(fields.key("rope.freq_base"), 1000000.0),
        SLIDING: fields.number(fields.key("rope.freq_base_swa"), 10000.0),
    }
    for kind, name in ((FULL, "rope.dimension_count"), (SLIDING, "rope.dimension_count_swa")):
        fields.expect(fields.key(name), (dims.get(kind),))
    schemes = {
        kind: proportional(thetas[kind], size, _rotated(size, stored) if kind == FULL else size // 2)
        for kind, size in dims.items()
    }
    by_layer: tuple[PositionScheme, ...] = tuple(schemes[t] for t in types)
    return {"positions": by_layer[0], "layer_positions": by_layer if len(set(by_layer)) > 1 else ()}


def _rotated(head_dim: int, stored: Mapping[str, StoredTensor]) -> int:
    """Pairs of a head that turn where there is no window: the tensor of divisors says it by ones, then huge numbers."""
    if FREQS not in stored:
        return head_dim // 2
    divisors = stored[FREQS].read(torch.float32).flatten()
    rotated = int((divisors == 1.0).sum())
    good = len(divisors) == head_dim // 2 and bool((divisors[:rotated] == 1.0).all())
    if not good or not rotated or not bool((divisors[rotated:] >= _STILL).all()):
        raise CheckpointError(
            f"{FREQS} holds other divisors than {head_dim // 2} ones and, after them, 1e30",
            field=FREQS,
            reason="UNKNOWN_ROPE_TYPE",
            remedy="load the model from its Hugging Face directory, where the parameters are given",
        )
    return rotated


def _experts(fields: Metadata) -> dict[str, Any]:
    count = fields.size("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if not count:
        return {}
    sizes = {"active_experts": "expert_used_count", "expert_width": "expert_feed_forward_length"}
    found = {name: fields.size(key) for name, key in sizes.items()}
    return {"experts": count, **found, "norm_experts": True, "experts_beside": True}
