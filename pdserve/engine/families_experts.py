"""Families whose MLPs are mixtures of experts, in all or some layers."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.families_common import ATTENTION_BIAS, LLAMA, renamed
from pdserve.engine.family import Family, Key
from pdserve.engine.hf_rope import RopeKeys

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
_STACKED = frozenset({"expert_gate", "expert_up", "expert_down"})
_SHARED = {f"shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}

_GPT_OSS = replace(
    renamed(
        router="mlp.router",
        **dict.fromkeys(("expert_gate", "expert_up"), "mlp.experts.gate_up_proj"),
        expert_down="mlp.experts.down_proj",
        sinks="self_attn.sinks",
    ),
    transposed=_STACKED,
    stacked=_STACKED,
    interleaved=(("expert_gate", "expert_up"),),
    complete=_STACKED | {"sinks"},
)

MIXTURES = (
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        renamed(**_QWEN_MODULES, **_SHARED, shared_router="mlp.shared_expert_gate"),
        {
            **LLAMA,
            **_QWEN_EXPERTS,
            "shared_width": Key("shared_expert_intermediate_size"),
            "qkv_bias": Key("qkv_bias", "flag", True),
        },
        layers="some dense, no windows",
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        renamed(**_QWEN_MODULES),
        {**LLAMA, **ATTENTION_BIAS, **_QWEN_EXPERTS},
        traits={"qk_norm": True},
        layers="some dense",
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        replace(
            renamed(**_SPARSE_MODULES, router_correction="block_sparse_moe.e_score_correction"),
            complete=frozenset({"router_correction"}),
        ),
        {**LLAMA, **_SPARSE_EXPERTS},
        traits={"qk_norm": True, "qk_norm_whole": True, "norm_experts": True, "sigmoid_router": True},
        rope=RopeKeys(default_theta=5000000.0, partial="partial_rotary_factor", dims="rotary_dim"),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        renamed(**_SPARSE_MODULES),
        {**LLAMA, **_SPARSE_EXPERTS},
        traits={"norm_experts": True},
        rope=RopeKeys(default_theta=1000000.0),
        layers="window if any",
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _GPT_OSS,
        {
            **LLAMA,
            **_SPARSE_EXPERTS,
            "active_experts": Key("num_experts_per_tok", also="experts_per_token"),
            **{name: Key("attention_bias", "flag", True) for name in ("qkv_bias", "attn_out_bias")},
            "swiglu_alpha": Key("swiglu_alpha", "number", 1.702),
            "swiglu_limit": Key("swiglu_limit", "number", 7.0),
        },
        traits={"norm_experts": True, "expert_bias": True, "attention_sinks": True},
        head_dim="required",
        rope=RopeKeys(default_theta=150000.0, scalings=("yarn",)),
        layers="types",
        pattern=2,
        fixed={"hidden_act": ("silu",)},
        harmless=frozenset({"initial_context_length"}),  # the original context, which the rotary object has
        packed=True,
    ),
)
