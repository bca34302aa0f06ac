"""The architectures of GGUF files, as data; gguf_spec.py reads the metadata by them.

Layouts that differ from ours, from the format's documentation and its converter: Llama's q and k rows hold rotary
neighbours; the q, k, v of GPT-2, BLOOM, Falcon and Phi-3 are one matrix, already [outputs, inputs], and BLOOM's and
Falcon's no longer alternate head by head; Phi-3's gate and up are one matrix; the norms of Gemma and Nemotron are
stored with their offset added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdserve.engine.stored import Naming

_MODULES = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "pos": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "sinks": "attn_sinks",
    "attn_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_out_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "router_correction": "exp_probs_b",
    "expert_gate": "ffn_gate_exps",
    "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps",
    "shared_router": "ffn_gate_inp_shexp",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
}
_PLAIN = Naming(layer="blk.{layer}.", modules=_MODULES)
_FUSED_QKV = replace(_PLAIN, modules={**_MODULES, **dict.fromkeys("qkv", "attn_qkv")}, fused=(("q", "k", "v"),))
_FUSED = replace(_FUSED_QKV, modules={**_FUSED_QKV.modules, "gate": "ffn_up"}, fused=(("q", "k", "v"), ("gate", "up")))
_CONVOLUTION = {"conv_in": "shortconv.in_proj", "conv": "shortconv.conv", "conv_out": "shortconv.out_proj"}
_BIASES = {"qkv_bias": "attn_q.bias", "attn_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"}


@dataclass(frozen=True)
class GgufFamily:
    """One architecture. Keys are without the architecture's prefix."""

    model_type: str  # what directories of the same models call it
    naming: Naming
    traits: Mapping[str, Any] = field(default_factory=dict)  # ModelSpec fields that never vary
    norm_eps: str = "attention.layer_norm_rms_epsilon"
    numbers: Mapping[str, str] = field(default_factory=dict)  # further ModelSpec fields -> key
    options: Mapping[str, str] = field(default_factory=dict)  # fields that are set where the first layer has a tensor
    without: Mapping[str, str] = field(default_factory=dict)  # fields that are set where it does not have one
    positions: str = "rope"  # rope | learned | alibi
    partial: bool = False  # a part of a head may be rotated
    window: str = ""  # key of the tokens that a layer with a window sees
    pattern: int = 0  # every so many-th layer has none; 0: all layers have one
    yarn_truncate: bool = True  # yarn's ramp ends at whole pairs; the format has no key for it
    local_theta: float = 0.0  # of the layers with a window, where these have a rotation of their own
    experts: bool = False  # in every layer
    shared_expert: bool = False  # beside them
    scaled_embedding: bool = False  # by the square root of the width
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys that would change the computation -> what we have
    harmless: frozenset[str] = frozenset()  # keys that change nothing
    rules: str = ""  # gguf_spec.py: what reads sizes and layers where these have rules of their own
    wide_scale: int = 0  # a model of so many layers scales scores by width / heads instead of the head dim


_LAYER_NORM = {
    "norm": "layer",
    "norm_shift": True,
    "mlp": "plain",
    "activation": "gelu_tanh",
    **dict.fromkeys(_BIASES, True),
}
_GEMMA4_MODULES = {
    "layer_embed": "per_layer_token_embd",
    "layer_in": "per_layer_model_proj",
    "layer_in_norm": "per_layer_proj_norm",
    "input_gate": "inp_gate",
    "input_proj": "proj",
    "input_norm": "post_norm",
    "layer_scale": "layer_output_scale",
    "router_norm": "ffn_gate_inp.scale",
    "expert_gains": "ffn_down_exps.scale",
    "expert_gate": "ffn_gate_up_exps",
    "expert_up": "ffn_gate_up_exps",
    "beside_mlp_norm": "post_ffw_norm_1",
    "beside_norm": "pre_ffw_norm_2",
    "beside_out_norm": "post_ffw_norm_2",
}
_GEMMA = {"norm_order": "sandwich", "norm_offset": 1.0, "activation": "gelu_tanh"}

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", replace(_PLAIN, paired=frozenset({"q", "k"})), options=_BIASES),
    "qwen2": GgufFamily("qwen2", _PLAIN, {"qkv_bias": True}),
    "qwen3": GgufFamily("qwen3", _PLAIN, {"qk_norm": True}),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        replace(_PLAIN, flat=frozenset({"shared_router"})),
        {"qkv_bias": True},
        experts=True,
        shared_expert=True,
    ),
    "qwen3moe": GgufFamily("qwen3_moe", _PLAIN, {"qk_norm": True, "norm_experts": True}, experts=True),
    "minimax-m2": GgufFamily(
        "minimax_m2",
        _PLAIN,
        {"qk_norm": True, "qk_norm_whole": True, "norm_experts": True, "sigmoid_router": True},
        partial=True,
        experts=True,
        fixed={"expert_gating_func": 2},  # sigmoid
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        replace(_PLAIN, modules={**_MODULES, "mlp_norm": "post_attention_norm"}),
        {
            "norm_experts": True, "expert_bias": True, "attention_sinks": True,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0,  # of every published model
        },
        options={"qkv_bias": "attn_q.bias", "attn_out_bias": "attn_output.bias"},
        window="attention.sliding_window",
        pattern=2,
        yarn_truncate=False,
        experts=True,
    ),
    "phi3": GgufFamily("phi3", _FUSED, partial=True, window="attention.sliding_window"),
    "gemma2": GgufFamily(
        "gemma2",
        replace(_PLAIN, add_to_scales=-1.0),
        _GEMMA,
        numbers={"soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"},
        window="attention.sliding_window",
        pattern=2,
        scaled_embedding=True,
        wide_scale=46,  # the 27B model
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        replace(_PLAIN, add_to_scales=-1.0),
        {**_GEMMA, "qk_norm": True},
        window="attention.sliding_window",
        pattern=6,
        local_theta=10000.0,
        scaled_embedding=True,
        wide_scale=62,  # the 27B model
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        replace(
            _PLAIN,
            modules={**_MODULES, **_GEMMA4_MODULES},
            stacked=frozenset({"expert_gate", "expert_up", "expert_down"}),
            fused=(("expert_gate", "expert_up"),),
            complete=frozenset({"router_norm", "expert_gains"}),
            unread=("k", "v", "k_norm"),
        ),
        {
            "norm_order": "sandwich",
            "activation": "gelu_tanh",
            "qk_norm": True,
            "v_norm": True,
            "attention_scale": 1.0,
        },
        options={"layer_scale": "layer_output_scale.weight"},
        scaled_embedding=True,
        rules="gemma4",
    ),
    "stablelm": GgufFamily(
        "stablelm",
        _PLAIN,
        {"norm": "layer", "norm_shift": True},
        norm_eps="attention.layer_norm_epsilon",
        options={"qkv_bias": "attn_q.bias", **dict.fromkeys(("qk_norm", "qk_norm_each"), "attn_q_norm.weight")},
        without=dict.fromkeys(("parallel", "one_norm"), "ffn_norm.weight"),
        partial=True,
        harmless=frozenset({"use_parallel_residual"}),  # the converter writes true where the model does not say it
    ),
    "nemotron": GgufFamily(
        "nemotron",
        replace(_PLAIN, add_to_scales=-1.0),
        {"norm": "layer", "norm_shift": True, "norm_offset": 1.0, "mlp": "plain", "activation": "relu2"},
        norm_eps="attention.layer_norm_epsilon",
        options=_BIASES,
        partial=True,
    ),
    "falcon": GgufFamily(
        "falcon",
        replace(
            _FUSED_QKV,
            modules={**_FUSED_QKV.modules, "attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"},
            one_norm={"attn_norm": "attn_norm"},
        ),
        {"norm": "layer", "norm_shift": True, "mlp": "plain", "activation": "gelu", "parallel": True},
        norm_eps="attention.layer_norm_epsilon",
        without={"one_norm": "attn_norm_2.weight"},
        fixed={"tensor_data_layout": "jploski"},  # the converter's name for q, k and v one after the other
    ),
    "lfm2": GgufFamily(
        "lfm2",
        replace(_PLAIN, modules={**_MODULES, "final_norm": "token_embd_norm", **_CONVOLUTION}),
        {"qk_norm": True},
        rules="lfm2",
    ),
    # Its directories name modules as Llama's do.
    "deci": GgufFamily("llama", replace(_PLAIN, paired=frozenset({"q", "k"})), rules="deci"),
    "starcoder2": GgufFamily(
        "starcoder2", _PLAIN, _LAYER_NORM, norm_eps="attention.layer_norm_epsilon"
    ),
    "gpt2": GgufFamily(
        "gpt2", _FUSED_QKV, _LAYER_NORM, norm_eps="attention.layer_norm_epsilon", positions="learned"
    ),
    "bloom": GgufFamily(
        "bloom",
        _FUSED_QKV,
        {**_LAYER_NORM, "embed_norm": True},
        norm_eps="attention.layer_norm_epsilon",
        positions="alibi",
    ),
}  # fmt: skip
