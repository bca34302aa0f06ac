"""The model families of the Hugging Face format, as data; hf_config.py reads a config.json by them.

A new family is one `Family` value if its block is one that ModelSpec can describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.stored import Naming

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Keys that describe training, generation defaults, other heads or bookkeeping: they do not
# change what a forward pass in inference computes. Everything else is taken or refused.
_BOOKKEEPING = {
    "_name_or_path", "_attn_implementation_autoset", "architectures", "dtype", "finetuning_task",
    "is_llama_config", "license", "model_type", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
_TRAINING = {
    "attention_dropout", "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "hidden_dropout", "initializer_range",
    "pretraining_tp", "resid_pdrop",
}  # fmt: skip
_GENERATION = {
    "cls_token_id", "decoder_start_token_id", "do_sample", "max_length", "min_length", "num_beams", "pad_token_id",
    "repetition_penalty", "sep_token_id", "temperature", "top_k", "top_p", "typical_p", "unk_token_id", "use_cache",
}  # fmt: skip
_OTHER_HEADS = {
    "_num_labels", "id2label", "label2id", "num_labels", "output_attentions", "output_hidden_states", "problem_type",
    "return_dict", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
}  # fmt: skip
HARMLESS_KEYS = frozenset(_BOOKKEEPING | _TRAINING | _GENERATION | _OTHER_HEADS)

# Keys that would change the computation, with the only values that are supported.
FIXED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),  # 0: the feed-forward is not cut, which is what we do
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1, 1.0),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False, True),
}


@dataclass(frozen=True)
class Family:
    """One architecture: the names its config and tensors use, and what is fixed about it."""

    architecture: str
    model_type: str
    naming: Naming
    sizes: Mapping[str, str]  # ModelSpec field -> config key
    traits: Mapping[str, Any] = field(default_factory=dict)  # ModelSpec fields that never vary
    grouped: bool = True  # has num_key_value_heads
    head_dim: str = "optional"  # optional | required | derived
    positions: str = "rope"  # rope | learned
    windows: str = "none"  # none | all: every layer | layers: layer_types or max_window_layers
    attention_bias: bool = False  # has the attention_bias option
    mlp_bias: bool = False  # has the mlp_bias option
    tied_default: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    optional_prefix: str = ""  # of tensor names; older files lack it


_SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context_limit": "max_position_embeddings",
}
_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "context_limit": "n_positions",
}
_NAMING = Naming(
    layer="model.layers.{layer}.",
    modules={
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
    },
    harmless=(r".*\.rotary_emb\.inv_freq",),
)
_GPT2_NAMING = Naming(
    layer="transformer.h.{layer}.",
    modules={
        "embed": "transformer.wte",
        "pos": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "attn_norm": "ln_1",
        "q": "attn.c_attn",
        "k": "attn.c_attn",
        "v": "attn.c_attn",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    transposed=frozenset({"q", "k", "v", "o", "up", "down"}),  # its Conv1D keeps [inputs, outputs]
    fused={"q": 0, "k": 1, "v": 2},
    harmless=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
)
_GPT2_TRAITS = {
    "norm": "layer",
    "norm_shift": True,
    "mlp": "plain",
    "qkv_bias": True,
    "attn_out_bias": True,
    "mlp_bias": True,
}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", _NAMING, _SIZES, attention_bias=True, mlp_bias=True),
    Family("MistralForCausalLM", "mistral", _NAMING, _SIZES, windows="all"),
    Family("Qwen2ForCausalLM", "qwen2", _NAMING, _SIZES, traits={"qkv_bias": True}, windows="layers"),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _NAMING,
        _SIZES,
        traits={"qk_norm": True},
        head_dim="required",
        windows="layers",
        attention_bias=True,
    ),
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2_NAMING,
        _GPT2_SIZES,
        traits=_GPT2_TRAITS,
        grouped=False,
        head_dim="derived",
        positions="learned",
        tied_default=True,
        fixed={"scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,)},
        optional_prefix="transformer.",
    ),
)
