"""Keys and tensor names that most families of the Hugging Face format share, after Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdserve.engine.family import ACTIVATIONS, Key
from pdserve.engine.stored import Naming

SIZES: Mapping[str, Key] = {
    "vocab_size": Key("vocab_size"),
    "width": Key("hidden_size"),
    "layers": Key("num_hidden_layers"),
    "heads": Key("num_attention_heads"),
    "context_limit": Key("max_position_embeddings"),
}
UNGROUPED = {"kv_heads": Key("", default=("heads", 1))}
TIED = {"tied_head": Key("tie_word_embeddings", "flag", True)}
UNTIED = {"tied_head": Key("tie_word_embeddings", "flag", False)}
GROUPED = {"kv_heads": Key("num_key_value_heads", default=("heads", 1))}
ATTENTION_BIAS = {name: Key("attention_bias", "flag", False) for name in ("qkv_bias", "attn_out_bias")}
MLP_BIAS = {"mlp_bias": Key("mlp_bias", "flag", False)}
LLAMA: Mapping[str, Key] = {
    **SIZES,
    **GROUPED,
    "ffn_width": Key("intermediate_size"),
    "norm_eps": Key("rms_norm_eps", "number"),
    "activation": Key("hidden_act", "choice", meaning=ACTIVATIONS),
    **UNTIED,
}

_MODULES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NAMING = Naming("model.layers.{layer}.", _MODULES, harmless=(r".*\.rotary_emb\.inv_freq",))


def renamed(**modules: str) -> Naming:
    """Llama's names but for these modules."""
    return replace(NAMING, modules={**_MODULES, **modules})
