"""The model families of the Hugging Face format, as data; docs/families.md shows how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdserve.engine.families_common import (
    ATTENTION_BIAS,
    GROUPED,
    LLAMA,
    MLP_BIAS,
    NAMING,
    SIZES,
    TIED,
    renamed,
)
from pdserve.engine.families_experts import MIXTURES
from pdserve.engine.families_gemma4 import GEMMA4
from pdserve.engine.families_older import OLDER
from pdserve.engine.family import ACTIVATIONS, Family, Key
from pdserve.engine.hf_rope import RopeKeys
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import Source
from pdserve.errors import CheckpointError

_GEMMA: Mapping[str, Key] = {
    **LLAMA,
    "activation": Key("hidden_activation", "choice", meaning=ACTIVATIONS),
    "attention_scale": Key("query_pre_attn_scalar", "number", power=-0.5),
    "embed_scale": Key("hidden_size", "number", power=0.5),
    "logit_soft_cap": Key("final_logit_softcapping", "number", 0.0, named=True),
    **ATTENTION_BIAS,
    **TIED,
}
_SANDWICH = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

_LLAMAS = (
    Family("LlamaForCausalLM", "llama", NAMING, {**LLAMA, **ATTENTION_BIAS, **MLP_BIAS}),
    Family("MistralForCausalLM", "mistral", NAMING, LLAMA, layers="one window"),
    Family("Qwen2ForCausalLM", "qwen2", NAMING, LLAMA, traits={"qkv_bias": True}, layers="upper windows"),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        NAMING,
        {**LLAMA, **ATTENTION_BIAS},
        traits={"qk_norm": True},
        head_dim="required",
        layers="upper windows",
    ),
    Family(
        "Phi3ForCausalLM",  # Phi-3, Phi-3.5 and Phi-4
        "phi3",
        replace(
            renamed(q="self_attn.qkv_proj", k="self_attn.qkv_proj", v="self_attn.qkv_proj",
                     gate="mlp.gate_up_proj", up="mlp.gate_up_proj"),
            fused=(("q", "k", "v"), ("gate", "up")),
        ),
        LLAMA,
        rope=RopeKeys(
            partial="partial_rotary_factor",
            default_original=4096,
            aliases={"su": "longrope", "yarn": "longrope"},
            scalings=("default", "longrope"),
        ),
        layers="window if any",
        fixed={"attention_bias": (False,)},  # in some files, and without effect
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        NAMING,
        {**LLAMA, **ATTENTION_BIAS, **MLP_BIAS, **TIED},
        rope=RopeKeys(default_theta=2000000.0),
        layers="some without positions",
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        NAMING,
        {
            **LLAMA,
            **ATTENTION_BIAS,
            **MLP_BIAS,
            "embed_scale": Key("embedding_multiplier", "number", 1.0),
            "residual_scale": Key("residual_multiplier", "number", 1.0),
            "attention_scale": Key("attention_multiplier", "number", 1.0),
            "logit_scale": Key("logits_scaling", "number", 1.0, power=-1.0),
        },
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        renamed(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
        {**LLAMA, **ATTENTION_BIAS},
        traits={"norm_order": "branch", "qk_norm": True, "qk_norm_whole": True},
    ),
)  # fmt: skip

_LAYER_NORMED = (
    Family(
        "StableLmForCausalLM",
        "stablelm",
        renamed(q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}"),
        {
            **LLAMA,
            "norm_eps": Key("layer_norm_eps", "number"),
            "qkv_bias": Key("use_qkv_bias", "flag", False),
            **{name: Key("qk_layernorm", "flag", False) for name in ("qk_norm", "qk_norm_each")},
            **{name: Key("use_parallel_residual", "flag", False) for name in ("parallel", "one_norm")},
        },
        traits={"norm": "layer", "norm_shift": True},
        head_dim="derived",
        rope=RopeKeys(partial="partial_rotary_factor", default_partial=0.25),
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        NAMING,
        {**LLAMA, **ATTENTION_BIAS, **MLP_BIAS, "norm_eps": Key("norm_eps", "number")},
        traits={"norm": "layer", "norm_shift": True, "norm_offset": 1.0, "mlp": "plain"},
        rope=RopeKeys(partial="partial_rotary_factor", default_partial=0.5),
    ),
)

_STARCODER2 = Family(  # docs/families.md tells how this one came here
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    naming=renamed(up="mlp.c_fc", down="mlp.c_proj"),
    keys={
        **SIZES,
        **GROUPED,
        "ffn_width": Key("intermediate_size"),
        "norm_eps": Key("norm_epsilon", "number"),
        "activation": Key("hidden_act", "choice", meaning=ACTIVATIONS),
        "qkv_bias": Key("use_bias", "flag", True),
        "attn_out_bias": Key("use_bias", "flag", True),
        "mlp_bias": Key("use_bias", "flag", True),
        **TIED,
    },
    traits={"norm": "layer", "norm_shift": True, "mlp": "plain"},
    layers="window if any",
    fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    harmless=frozenset({"embedding_dropout", "residual_dropout"}),
)

_GEMMAS = (
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        renamed(**_SANDWICH),
        {**_GEMMA, "soft_cap": Key("attn_logit_softcapping", "number", 0.0, named=True)},
        traits={"norm_order": "sandwich", "norm_offset": 1.0},
        head_dim="required",
        layers="types",
        pattern=2,
        fixed={"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        renamed(**_SANDWICH),
        _GEMMA,
        traits={"norm_order": "sandwich", "norm_offset": 1.0, "qk_norm": True},
        head_dim="required",
        rope=RopeKeys(default_theta=1000000.0),
        local_rope=RopeKeys(theta="rope_local_base_freq", scalings=("default",)),
        layers="types",
        pattern=6,
        fixed={"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False,)},
    ),
)

_LFM2 = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    replace(
        renamed(
            attn_norm="operator_norm", mlp_norm="ffn_norm", final_norm="model.embedding_norm",
            q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm", o="self_attn.out_proj",
            conv_in="conv.in_proj", conv="conv.conv", conv_out="conv.out_proj",
            gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2",
        ),
        squeezed=frozenset({"conv"}),
    ),
    {
        **SIZES,
        **GROUPED,
        "ffn_width": Key("intermediate_size", also="block_ff_dim"),
        "norm_eps": Key("norm_eps", "number"),
        "conv_bias": Key("conv_bias", "flag", False),
        "tied_head": Key("tie_word_embeddings", "flag", True, also="tie_embedding"),
    },
    traits={"qk_norm": True},
    rope=RopeKeys(default_theta=1000000.0),
    layers="convolutions",
    fixed={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
    # Of training, or said a second time under a name that the peer does not read either.
    harmless=frozenset({
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init",
        "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
    }),
)  # fmt: skip

FAMILIES = (*_LLAMAS, *_LAYER_NORMED, _STARCODER2, _LFM2, *_GEMMAS, *GEMMA4, *MIXTURES, *OLDER)


def directory_sources(model_type: str, spec: ModelSpec) -> dict[str, Source]:
    """Where a Hugging Face directory of this type has the tensors of a spec: by these names adapters know modules.

    Empty for a type that no family here has, or with a tensor that its family does not name.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            try:
                return family.naming.sources(spec)
            except CheckpointError:
                return {}
    return {}
