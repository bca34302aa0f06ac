"""The model families of the Hugging Face format, as data; docs/families.md shows how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdserve.engine.families_older import OLDER, SIZES, TIED, UNTIED
from pdserve.engine.family import ACTIVATIONS, Family, Key
from pdserve.engine.hf_rope import RopeKeys
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import Naming, Source
from pdserve.errors import CheckpointError

# ---- keys ---------------------------------------------------------------------------------------

_GROUPED = {"kv_heads": Key("num_key_value_heads", default=("heads", 1))}
_ATTENTION_BIAS = {name: Key("attention_bias", "flag", False) for name in ("qkv_bias", "attn_out_bias")}
_MLP_BIAS = {"mlp_bias": Key("mlp_bias", "flag", False)}
_LLAMA: Mapping[str, Key] = {
    **SIZES,
    **_GROUPED,
    "ffn_width": Key("intermediate_size"),
    "norm_eps": Key("rms_norm_eps", "number"),
    "activation": Key("hidden_act", "choice", meaning=ACTIVATIONS),
    **UNTIED,
}
_GEMMA: Mapping[str, Key] = {
    **_LLAMA,
    "activation": Key("hidden_activation", "choice", meaning=ACTIVATIONS),
    "attention_scale": Key("query_pre_attn_scalar", "number", power=-0.5),
    "embed_scale": Key("hidden_size", "number", power=0.5),
    "logit_soft_cap": Key("final_logit_softcapping", "number", 0.0, named=True),
    **_ATTENTION_BIAS,
    **TIED,
}

# ---- tensor names -------------------------------------------------------------------------------

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
_NAMING = Naming("model.layers.{layer}.", _MODULES, harmless=(r".*\.rotary_emb\.inv_freq",))
_SANDWICH = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _renamed(**modules: str) -> Naming:
    return replace(_NAMING, modules={**_MODULES, **modules})


# ---- families -----------------------------------------------------------------------------------

_LLAMAS = (
    Family("LlamaForCausalLM", "llama", _NAMING, {**_LLAMA, **_ATTENTION_BIAS, **_MLP_BIAS}),
    Family("MistralForCausalLM", "mistral", _NAMING, _LLAMA, layers="one window"),
    Family("Qwen2ForCausalLM", "qwen2", _NAMING, _LLAMA, traits={"qkv_bias": True}, layers="upper windows"),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _NAMING,
        {**_LLAMA, **_ATTENTION_BIAS},
        traits={"qk_norm": True},
        head_dim="required",
        layers="upper windows",
    ),
    Family(
        "Phi3ForCausalLM",  # Phi-3, Phi-3.5 and Phi-4
        "phi3",
        replace(
            _renamed(q="self_attn.qkv_proj", k="self_attn.qkv_proj", v="self_attn.qkv_proj",
                     gate="mlp.gate_up_proj", up="mlp.gate_up_proj"),
            fused=(("q", "k", "v"), ("gate", "up")),
        ),
        _LLAMA,
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
        _NAMING,
        {**_LLAMA, **_ATTENTION_BIAS, **_MLP_BIAS, **TIED},
        rope=RopeKeys(default_theta=2000000.0),
        layers="some without positions",
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        _NAMING,
        {
            **_LLAMA,
            **_ATTENTION_BIAS,
            **_MLP_BIAS,
            "embed_scale": Key("embedding_multiplier", "number", 1.0),
            "residual_scale": Key("residual_multiplier", "number", 1.0),
            "attention_scale": Key("attention_multiplier", "number", 1.0),
            "logit_scale": Key("logits_scaling", "number", 1.0, power=-1.0),
        },
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        _renamed(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"),
        {**_LLAMA, **_ATTENTION_BIAS},
        traits={"norm_order": "branch", "qk_norm": True, "qk_norm_whole": True},
    ),
)  # fmt: skip

_LAYER_NORMED = (
    Family(
        "StableLmForCausalLM",
        "stablelm",
        _renamed(q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}"),
        {
            **_LLAMA,
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
        _NAMING,
        {**_LLAMA, **_ATTENTION_BIAS, **_MLP_BIAS, "norm_eps": Key("norm_eps", "number")},
        traits={"norm": "layer", "norm_shift": True, "norm_offset": 1.0, "mlp": "plain"},
        rope=RopeKeys(partial="partial_rotary_factor", default_partial=0.5),
    ),
)

_STARCODER2 = Family(  # docs/families.md tells how this one came here
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    naming=_renamed(up="mlp.c_fc", down="mlp.c_proj"),
    keys={
        **SIZES,
        **_GROUPED,
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
        _renamed(**_SANDWICH),
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
        _renamed(**_SANDWICH),
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

_QWEN_EXPERTS = {
    "experts": Key("num_experts", also="num_local_experts"),
    "active_experts": Key("num_experts_per_tok"),
    "expert_width": Key("moe_intermediate_size"),
    "norm_experts": Key("norm_topk_prob", "flag", False),
}
_QWEN_MODULES = {
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
}
_SPARSE_EXPERTS = {
    "experts": Key("num_local_experts", also="num_experts"),
    "active_experts": Key("num_experts_per_tok"),
    "expert_width": Key("intermediate_size"),
}
_SPARSE_MODULES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1",
    "expert_up": "block_sparse_moe.experts.{expert}.w3",
    "expert_down": "block_sparse_moe.experts.{expert}.w2",
}
_SHARED = {f"shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}

_MIXTURES = (
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _renamed(**_QWEN_MODULES, **_SHARED, shared_router="mlp.shared_expert_gate"),
        {
            **_LLAMA,
            **_QWEN_EXPERTS,
            "shared_width": Key("shared_expert_intermediate_size"),
            "qkv_bias": Key("qkv_bias", "flag", True),
        },
        layers="some dense, no windows",
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _renamed(**_QWEN_MODULES),
        {**_LLAMA, **_ATTENTION_BIAS, **_QWEN_EXPERTS},
        traits={"qk_norm": True},
        layers="some dense",
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        replace(
            _renamed(**_SPARSE_MODULES, router_correction="block_sparse_moe.e_score_correction_bias"),
            complete=frozenset({"router_correction"}),
        ),
        {**_LLAMA, **_SPARSE_EXPERTS},
        traits={"qk_norm": True, "qk_norm_whole": True, "norm_experts": True, "sigmoid_router": True},
        rope=RopeKeys(default_theta=5000000.0, partial="partial_rotary_factor", dims="rotary_dim"),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _renamed(**_SPARSE_MODULES),
        {**_LLAMA, **_SPARSE_EXPERTS},
        traits={"norm_experts": True},
        rope=RopeKeys(default_theta=1000000.0),
        layers="window if any",
    ),
)

FAMILIES = (*_LLAMAS, *_LAYER_NORMED, _STARCODER2, *_GEMMAS, *_MIXTURES, *OLDER)


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
