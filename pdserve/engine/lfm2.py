"""LFM2's layers, as both formats tell them: attention in some, a short convolution in its place in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cache_transfer.contract import PositionScheme
from pdserve.engine.fields import Fields
from pdserve.engine.gguf_metadata import Metadata, head_dim, vocab_size
from pdserve.engine.gguf_rope import gguf_rope_scheme
from pdserve.engine.spec import LayerShape, shape_fields
from pdserve.engine.stored import StoredTensor
from pdserve.engine.validate import MAX_LAYERS

_ATTENTION, _CONVOLUTION = "full_attention", "conv"


def layer_fields(
    attends: Sequence[bool], attention: LayerShape, width: int, kernel: int, positions: PositionScheme
) -> dict[str, Any]:
    """Shapes, windows and positions of layers that attend, or convolve over the last `kernel` tokens."""
    convolution, none = LayerShape(1, 1, width, kernel), PositionScheme(kind="none")
    found: dict[str, Any] = {**shape_fields([attention if own else convolution for own in attends])}
    if not all(attends):
        found["sliding_window"] = tuple(0 if own else kernel for own in attends)
        found["layer_positions"] = tuple(positions if own else none for own in attends)
    return found


def hf_fields(fields: Fields, read: Mapping[str, Any]) -> dict[str, Any]:
    """Of a config.json; read: layers, heads, kv_heads, head_dim, width, ffn_width and positions."""
    shape = LayerShape(read["heads"], read["kv_heads"], read["head_dim"])
    kernel = fields.integer("conv_L_cache", 3)
    layers = layer_fields(_attends(fields, read["layers"]), shape, read["width"], kernel, read["positions"])
    return {**layers, "ffn_width": _ffn_width(fields, read["ffn_width"])}


def gguf_fields(fields: Metadata, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Layers without KV heads convolve. Raises CheckpointError naming the key."""
    width, layers = fields.size("embedding_length"), fields.size("block_count", maximum=MAX_LAYERS)
    heads, kv_heads = fields.size("attention.head_count"), fields.sizes("attention.head_count_kv", layers, 0)
    if len(set(kv_heads) - {0}) != 1:
        key = fields.key("attention.head_count_kv")
        raise fields.unsupported(key, list(kv_heads), "expected one number of KV heads, and 0 for convolutions")
    dims, context = head_dim(fields, width, heads), fields.size("context_length")
    positions = gguf_rope_scheme(fields, fields.arch, dims, context, False, True, stored)
    shape = LayerShape(heads, max(kv_heads), dims)
    return {
        "vocab_size": vocab_size(fields, stored),
        "width": width,
        "layers": layers,
        **layer_fields([kv > 0 for kv in kv_heads], shape, width, fields.size("shortconv.l_cache"), positions),
        "ffn_width": fields.size("feed_forward_length"),
        "context_limit": context,
        "positions": positions,
    }


def _attends(fields: Fields, layers: int) -> list[bool]:
    """layer_types, or full_attn_idxs in older files; without either every layer attends."""
    numbers = fields.take("full_attn_idxs", None)
    if numbers is not None and not (
        isinstance(numbers, list) and all(type(number) is int and 0 <= number < layers for number in numbers)
    ):
        raise fields.unsupported("full_attn_idxs", numbers, f"expected numbers of {layers} layers")
    told = range(layers) if numbers is None else numbers
    types = fields.take("layer_types", None)
    if types is None:
        return [layer in told for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_ATTENTION, _CONVOLUTION}:
        raise fields.unsupported("layer_types", types, f"expected {_ATTENTION} or {_CONVOLUTION} for {layers} layers")
    if numbers is not None and [layer in told for layer in range(layers)] != [kind == _ATTENTION for kind in types]:
        raise fields.unsupported("full_attn_idxs", numbers, "layer_types tells it otherwise")
    return [kind == _ATTENTION for kind in types]


def _ffn_width(fields: Fields, width: int) -> int:
    """Two thirds of the configuration's, times a factor, rounded up to a multiple; or just that."""
    adjusted = fields.flag("block_auto_adjust_ff_dim", True)
    factor, multiple = fields.number("block_ffn_dim_multiplier", 1.0), fields.integer("block_multiple_of", 256)
    if not adjusted:
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple
