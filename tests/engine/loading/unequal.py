"""A model of unequal layers as DeciLM and Nemotron-NAS have them, put together from the peer library's Llama.

The library maps the architecture's metadata, but has no class for it. Each layer here is one of its own modules with a
configuration of its own, or stands for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tests.engine.loading.gguf_writing import pair_neighbours, write_gguf
from tests.engine.loading.peer_rows import GROUPED

HEADS = 4
WIDTH = 48


@dataclass(frozen=True)
class Kind:
    kv_heads: int = 2  # 0: a matrix in attention's place
    heads: int = HEADS  # 0: nothing in it
    ffn: int = 56  # 0: no MLP


KINDS = (Kind(2), Kind(0, 0, 40), Kind(4, ffn=64), Kind(0), Kind(1, ffn=0), Kind(2))


class _Matrix(nn.Module):
    """In attention's place."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.o_proj(hidden_states), None


class _Nothing(nn.Module):
    """Adds nothing, as attention (which gives a pair) or as an MLP."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self._pair = pair

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._pair else nothing


def make_unequal(kinds: tuple[Kind, ...] = KINDS, **options: Any) -> Any:
    sizes = {**GROUPED, "hidden_size": WIDTH, "head_dim": None, "num_hidden_layers": len(kinds), **options}
    config = transformers.LlamaConfig(**{name: value for name, value in sizes.items() if name != "head_dim"})
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(config).eval()
    for index, (layer, kind) in enumerate(zip(model.model.layers, kinds, strict=True)):
        own = copy.deepcopy(config)
        own.num_key_value_heads, own.intermediate_size = kind.kv_heads or 1, kind.ffn or 1
        layer.self_attn = LlamaAttention(own, index) if kind.kv_heads else _Matrix() if kind.heads else _Nothing(True)
        layer.mlp = LlamaMLP(own) if kind.ffn else _Nothing(False)
        if not kind.heads:
            layer.input_layernorm = nn.Identity()
        if not kind.ffn:
            layer.post_attention_layernorm = nn.Identity()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0.0, config.initializer_range)
    return model.eval()


def write_unequal(
    model: Any, path: Path, kinds: tuple[Kind, ...] = KINDS, metadata: Mapping[str, Any] | None = None
) -> Path:
    """As the format's converter writes it: a list where layers differ."""
    lists = {
        "attention.head_count": [kind.heads for kind in kinds],
        "attention.head_count_kv": [kind.kv_heads for kind in kinds],
        "feed_forward_length": [kind.ffn for kind in kinds],
    }
    own = {f"deci.{name}": found[0] if len(set(found)) == 1 else found for name, found in lists.items()}
    config = model.config
    tensors = {
        f"blk.{index}.attn_{name}.weight": pair_neighbours(getattr(layer.self_attn, f"{name}_proj").weight, heads)
        for index, (layer, kind) in enumerate(zip(model.model.layers, kinds, strict=True))
        for name, heads in (("q", kind.heads), ("k", kind.kv_heads))
        if kind.kv_heads
    }
    found, config.model_type = config.model_type, "deci"
    try:
        return write_gguf(model, path, metadata={**own, **(metadata or {})}, tensors=tensors)
    finally:
        config.model_type = found
