"""Families whose layers differ most from Llama's: GPT-2, OPT, GPT-NeoX, BLOOM and Falcon."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.engine.family import ACTIVATIONS, Family, Key
from pdserve.engine.hf_rope import RopeKeys
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
_BIASES = ("qkv_bias", "attn_out_bias", "mlp_bias")
_LAYER_NORM = {"norm": "layer", "norm_shift": True, "mlp": "plain"}

OLDER = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        Naming(
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
            fused=(("q", "k", "v"),),
            harmless=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
        ),
        {
            "vocab_size": Key("vocab_size"),
            "width": Key("n_embd"),
            "layers": Key("n_layer"),
            "heads": Key("n_head"),
            "context_limit": Key("n_positions", also="n_ctx"),
            **UNGROUPED,
            "ffn_width": Key("n_inner", default=("width", 4)),
            "norm_eps": Key("layer_norm_epsilon", "number"),
            "activation": Key("activation_function", "choice", meaning=ACTIVATIONS),
            "attention_scale": Key("scale_attn_weights", "flag", True, meaning={True: 0.0, False: 1.0}),
            **TIED,
        },
        traits={**_LAYER_NORM, **dict.fromkeys(_BIASES, True)},
        head_dim="derived",
        positions="learned",
        fixed={"scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,)},
        optional_prefix="transformer.",
    ),
    Family(
        "OPTForCausalLM",
        "opt",
        Naming(
            layer="model.decoder.layers.{layer}.",
            modules={
                "embed": "model.decoder.embed_tokens",
                "pos": "model.decoder.embed_positions",
                "in_proj": "model.decoder.project_in",
                "final_norm": "model.decoder.final_layer_norm",
                "out_proj": "model.decoder.project_out",
                "head": "lm_head",
                "attn_norm": "self_attn_layer_norm",
                "q": "self_attn.q_proj",
                "k": "self_attn.k_proj",
                "v": "self_attn.v_proj",
                "o": "self_attn.out_proj",
                "mlp_norm": "final_layer_norm",
                "up": "fc1",
                "down": "fc2",
            },
            skipped={"pos": 2},  # its position p stands in row p + 2
        ),
        {
            **SIZES,
            **UNGROUPED,
            "ffn_width": Key("ffn_dim"),
            "activation": Key("activation_function", "choice", meaning=ACTIVATIONS),
            "norm_order": Key("do_layer_norm_before", "flag", True, meaning={True: "pre", False: "post"}),
            "final_norm": Key("do_layer_norm_before", "flag", True),
            "norm_scale": Key("layer_norm_elementwise_affine", "flag", True),
            "norm_shift": Key("layer_norm_elementwise_affine", "flag", True),
            **{name: Key("enable_bias", "flag", True) for name in _BIASES},
            "embed_width": Key("word_embed_proj_dim", default=("width", 1), unless="width"),
            "out_width": Key("word_embed_proj_dim", default=("width", 1), unless="width"),
            **TIED,
        },
        traits={"norm": "layer", "norm_eps": 1e-5, "mlp": "plain"},
        head_dim="derived",
        positions="learned",
        fixed={"_remove_final_layer_norm": (False,)},
        optional_prefix="model.",
    ),
    Family(
        "GPTNeoXForCausalLM",  # and Pythia
        "gpt_neox",
        Naming(
            layer="gpt_neox.layers.{layer}.",
            modules={
                "embed": "gpt_neox.embed_in",
                "final_norm": "gpt_neox.final_layer_norm",
                "head": "embed_out",
                "attn_norm": "input_layernorm",
                "q": "attention.query_key_value",
                "k": "attention.query_key_value",
                "v": "attention.query_key_value",
                "o": "attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            fused=(("q", "k", "v"),),
            per_head=True,
            harmless=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
        ),
        {
            **SIZES,
            **UNGROUPED,
            "ffn_width": Key("intermediate_size"),
            "norm_eps": Key("layer_norm_eps", "number"),
            "activation": Key("hidden_act", "choice", meaning=ACTIVATIONS),
            "parallel": Key("use_parallel_residual", "flag", True),
            **{name: Key("attention_bias", "flag", True) for name in ("qkv_bias", "attn_out_bias")},
            **UNTIED,
        },
        traits={**_LAYER_NORM, "mlp_bias": True},
        head_dim="derived",
        rope=RopeKeys(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25),
    ),
    Family(
        "BloomForCausalLM",
        "bloom",
        Naming(
            layer="transformer.h.{layer}.",
            modules={
                "embed": "transformer.word_embeddings",
                "embed_norm": "transformer.word_embeddings_layernorm",
                "final_norm": "transformer.ln_f",
                "head": "lm_head",
                "attn_norm": "input_layernorm",
                "q": "self_attention.query_key_value",
                "k": "self_attention.query_key_value",
                "v": "self_attention.query_key_value",
                "o": "self_attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            fused=(("q", "k", "v"),),
            per_head=True,
        ),
        {
            "vocab_size": Key("vocab_size"),
            "width": Key("hidden_size", also="n_embed"),
            "layers": Key("n_layer", also="num_hidden_layers"),
            "heads": Key("n_head", also="num_attention_heads"),
            "context_limit": Key("seq_length", default=2048),  # what it was trained with; ALiBi has no end of its own
            **UNGROUPED,
            "ffn_width": Key("n_inner", default=("width", 4)),
            "norm_eps": Key("layer_norm_epsilon", "number"),
            **TIED,
        },
        traits={**_LAYER_NORM, "activation": "gelu_tanh", "embed_norm": True, **dict.fromkeys(_BIASES, True)},
        head_dim="derived",
        positions="alibi",
        fixed={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
        harmless=frozenset({
            "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
            "skip_bias_add", "skip_bias_add_qkv",
        }),
        optional_prefix="transformer.",
    ),
    Family(
        "FalconForCausalLM",  # 7B, and the newer layout of 11B, 40B and 180B
        "falcon",
        Naming(
            layer="transformer.h.{layer}.",
            modules={
                "embed": "transformer.word_embeddings",
                "final_norm": "transformer.ln_f",
                "head": "lm_head",
                "attn_norm": "ln_attn",
                "q": "self_attention.query_key_value",
                "k": "self_attention.query_key_value",
                "v": "self_attention.query_key_value",
                "o": "self_attention.dense",
                "mlp_norm": "ln_mlp",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            fused=(("q", "k", "v"),),
            per_head=True,
            one_norm={"attn_norm": "input_layernorm"},
            harmless=(r".*\.rotary_emb\.inv_freq",),
        ),
        {
            **SIZES,
            "context_limit": Key("max_position_embeddings", default=2048),
            "ffn_width": Key("ffn_hidden_size", default=("width", 4)),
            "norm_eps": Key("layer_norm_epsilon", "number", 1e-5),
            "activation": Key("activation", "choice", "gelu", meaning=ACTIVATIONS),
            **{name: Key("bias", "flag", False) for name in _BIASES},
            **TIED,
        },
        traits={**_LAYER_NORM, "parallel": True},
        head_dim="derived",
        layers="two layouts",
        fixed={
            "alibi": (False,),
            "parallel_attn": (True,),
            "apply_residual_connection_post_layernorm": (False,),
        },
    ),
)  # fmt: skip
