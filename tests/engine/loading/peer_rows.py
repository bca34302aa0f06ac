"""Which tiny models the peer library is asked to make: each family, with the options that its checkpoints vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPREAD = 0.2  # of the initialiser: wide enough for a wrong position or head to show
VOCAB = 61
_SMALL = {"vocab_size": VOCAB, "initializer_range": SPREAD, "bos_token_id": 1, "eos_token_id": 2}
# Four query and two KV heads of 12: head_dim * heads is 48, the width 40.
GROUPED = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    **_SMALL,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}

_STARCODER = {"head_dim": None, "rms_norm_eps": None, "norm_epsilon": 1e-5}
_GEMMA = {"query_pre_attn_scalar": 7, "pad_token_id": 0}
_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 5,
    "vocab_size_per_layer_input": VOCAB, "global_head_dim": 12,
}  # fmt: skip
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
_TYPES4 = {  # another turn of each type of layer, and other bases
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5}
_NEOX = {"num_key_value_heads": None, "rms_norm_eps": None, "hidden_size": 64, "head_dim": None, "rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}}  # fmt: skip
_STABLELM = {"hidden_size": 64, "head_dim": None, "rms_norm_eps": None, "layer_norm_eps": 1e-5, "use_qkv_bias": True}
_NEMOTRON = {"rms_norm_eps": None, "norm_eps": 1e-5}
_LFM2 = {
    "hidden_size": 48, "head_dim": None, "rms_norm_eps": None, "norm_eps": 1e-5, "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8,
}  # fmt: skip
_FALCON = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5, **_SMALL,
}  # fmt: skip
_FALCON_GROUPS = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 56}  # as 40B
_OPT = {
    "vocab_size": VOCAB, "hidden_size": 40, "ffn_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "init_std": SPREAD, "bos_token_id": 1, "eos_token_id": 2, "word_embed_proj_dim": 40,
}  # fmt: skip
_BLOOM = {"hidden_size": 40, "n_layer": 3, "n_head": 4, **_SMALL}
_PAIRS = 6  # rotary pairs of a head of 12


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def longrope(pairs: int, **parameters: Any) -> dict[str, Any]:
    lists = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.5 * i for i in range(pairs)],
    }
    return scaled("longrope", **lists, **parameters)


_GPT_OSS = {  # the limit is so low that it holds for many values, as in large models
    **_MIXTRAL,
    "sliding_window": 5,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 0.6,
    **scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=0.2, truncate=False),
}
# Name -> (config class, model class, options).
_ROWS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-derived-head-dim": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": None}),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama3-scaled": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-one-kv-head": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-short-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "mistral-long-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 50}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": None}),
    "qwen2-windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_WINDOW, "head_dim": None, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-windows": ("Qwen3Config", "Qwen3ForCausalLM", {**_WINDOW, "max_window_layers": 1}),
    "qwen3-biases": ("Qwen3Config", "Qwen3ForCausalLM", {"attention_bias": True}),
    "llama-linear": ("LlamaConfig", "LlamaForCausalLM", scaled("linear", factor=3.0)),
    "llama-dynamic": ("LlamaConfig", "LlamaForCausalLM", scaled("dynamic", factor=3.0)),
    "llama-yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0),
    ),
    "llama-yarn-mscale": (
        "LlamaConfig",
        "LlamaForCausalLM",
        scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=1.0,
            beta_slow=0.2,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "llama-longrope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        longrope(_PAIRS, factor=4.0, original_max_position_embeddings=16),
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": 5}),
    "phi3-long-window": ("Phi3Config", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": 50}),
    "phi3-longrope": (  # as Phi-4-mini: long factors, a partly rotated head
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "head_dim": None,
            "hidden_size": 64,
            "original_max_position_embeddings": 16,
            **longrope(6, partial_rotary_factor=0.75, original_max_position_embeddings=16),
        },
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {**_WINDOW, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False},
    ),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "head_dim": None,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.5,
            "logits_scaling": 1.3,
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"head_dim": None}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**_STARCODER, "sliding_window": 5}),
    "starcoder2-without-biases": ("Starcoder2Config", "Starcoder2ForCausalLM", {**_STARCODER, "use_bias": False}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GEMMA, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-long-window": ("Gemma2Config", "Gemma2ForCausalLM", {**_GEMMA, "sliding_window": 50}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_GEMMA, "sliding_window": 5, "sliding_window_pattern": 2, "rope_parameters": _TWO_BASES},
    ),
    "gemma3-long-window": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 50,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (  # as E2B: inputs of each layer, upper layers that read a lower one's cache and have wider MLPs
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-global-heads": (  # as 31B: wider heads in layers without a window, whose values are their keys
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 20,
            "num_global_key_value_heads": 1,
            "rope_parameters": _TYPES4,
        },
    ),
    "gemma4-experts": (  # as 26B-A4B
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**_GEMMA4, **_GEMMA4_EXPERTS, "hidden_size_per_layer_input": 0, "sliding_window": 50, "attention_bias": True},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, **_WINDOW, "mlp_only_layers": [1]},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_MOE, "head_dim": None, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
    ),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**_MIXTRAL, "rotary_dim": 6}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
    "gpt-oss-long-window": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_GPT_OSS,
            "attention_bias": False,
            "sliding_window": 50,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL),
    "mixtral-window": ("MixtralConfig", "MixtralForCausalLM", {**_MIXTRAL, "sliding_window": 5}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _NEOX),
    "gpt-neox-sequential": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _LFM2),
    "lfm2-long-kernel": (  # longer than the prompt; with biases, and widths as they are
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            **_LFM2,
            "conv_L_cache": 30,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _STABLELM),
    "stablelm-parallel": (  # as the 12B model
        "StableLmConfig",
        "StableLmForCausalLM",
        {**_STABLELM, "use_qkv_bias": False, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _NEMOTRON),
    "falcon": ("FalconConfig", "FalconForCausalLM", _FALCON),
    "falcon-groups": ("FalconConfig", "FalconForCausalLM", _FALCON_GROUPS),
    "falcon-groups-one-norm": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON_GROUPS, "num_ln_in_parallel_attn": 1, "bias": True, "tie_word_embeddings": False},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT),
    "opt-post-norm": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", _BLOOM),
    "bloom-six-heads": ("BloomConfig", "BloomForCausalLM", {**_BLOOM, "n_head": 6, "hidden_size": 48}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"activation_function": "gelu_new"}),
    "gpt2-exact-gelu": ("GPT2Config", "GPT2LMHeadModel", {"activation_function": "gelu"}),
    "gpt2-unscaled": ("GPT2Config", "GPT2LMHeadModel", {"scale_attn_weights": False}),
    "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", {"tie_word_embeddings": False, "n_inner": 72}),
}
# These again, with windows longer than the prompt.
_SHORT = ("qwen2-windows", "qwen3-windows", "smollm3-windows", "starcoder2", "qwen3-moe-mixed", "mixtral-window")
_LONG = {f"{name}-long": (*_ROWS[name][:2], {**_ROWS[name][2], "sliding_window": 50}) for name in _SHORT}
PEERS = {**_ROWS, **_LONG}
SIZED = ("head_dim", "num_key_value_heads", "rms_norm_eps")  # None: the family has no such key
_GPT2_SIZES = {"n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 64, **_SMALL}
SIZES: Mapping[str, dict[str, Any]] = {"GPT2Config": _GPT2_SIZES} | {
    f"{name}Config": {} for name in ("OPT", "Bloom", "Falcon")
}
