"""GGUF architectures whose layers are of several kinds, told by lists of sizes in which 0 means that there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.engine.gguf_metadata import Metadata, head_dim, vocab_size
from pdserve.engine.gguf_rope import gguf_rope_scheme
from pdserve.engine.spec import LayerShape, ffn_fields, shape_fields
from pdserve.engine.stored import StoredTensor
from pdserve.engine.validate import MAX_LAYERS


def deci_fields(fields: Metadata, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """DeciLM and Nemotron-NAS: heads, KV heads and MLP of each layer as a search has left them.

    A layer with heads but no KV heads has a matrix in attention's place. Raises CheckpointError naming the key.
    """
    width, layers = fields.size("embedding_length"), fields.size("block_count", maximum=MAX_LAYERS)
    heads = fields.sizes("attention.head_count", layers, 0)
    kv_heads = fields.sizes("attention.head_count_kv", layers, 0)
    if any(kv and not own for own, kv in zip(heads, kv_heads, strict=True)) or not any(kv_heads):
        raise fields.unsupported(fields.key("attention.head_count_kv"), kv_heads, f"beside {list(heads)} query heads")
    dims, context = head_dim(fields, width, max(heads)), fields.size("context_length")
    shapes = [LayerShape(own, kv, dims if own else 0) for own, kv in zip(heads, kv_heads, strict=True)]
    return {
        "vocab_size": vocab_size(fields, stored),
        "width": width,
        "layers": layers,
        **shape_fields(shapes),
        **ffn_fields(fields.sizes("feed_forward_length", layers, 0)),
        "context_limit": context,
        "positions": gguf_rope_scheme(fields, fields.arch, dims, context, False, True, stored),
    }
