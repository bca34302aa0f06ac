"""Gemma 4: the text model by itself, and inside the checkpoints that see and hear as well."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.families_common import ATTENTION_BIAS, LLAMA, TIED, renamed
from pdserve.engine.family import ACTIVATIONS, Family, Key

_KEYS = {
    **LLAMA,
    "activation": Key("hidden_activation", "choice", meaning=ACTIVATIONS),
    "embed_scale": Key("hidden_size", "number", power=0.5),
    "logit_soft_cap": Key("final_logit_softcapping", "number", 0.0),
    **ATTENTION_BIAS,
    **TIED,
}
_MODULES = {
    "layer_embed": "model.embed_tokens_per_layer",
    "layer_in": "model.per_layer_model_projection",
    "layer_in_norm": "model.per_layer_projection_norm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "input_gate": "per_layer_input_gate",
    "input_proj": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "layer_scale": "layer_scalar",
    "v_norm": "self_attn.v_norm",  # without a tensor that we read
    "router": "router.proj",
    "router_norm": "router.scale",
    "expert_gains": "router.per_expert_scale",
    "expert_gate": "experts.gate_up_proj",
    "expert_up": "experts.gate_up_proj",
    "expert_down": "experts.down_proj",
    "beside_mlp_norm": "post_feedforward_layernorm_1",
    "beside_norm": "pre_feedforward_layernorm_2",
    "beside_out_norm": "post_feedforward_layernorm_2",
}
_NAMING = replace(
    renamed(**_MODULES),
    stacked=frozenset({"expert_gate", "expert_up", "expert_down"}),
    fused=(("expert_gate", "expert_up"),),
    complete=frozenset({"layer_scale", "router_norm", "expert_gains", "expert_gate", "expert_up", "expert_down"}),
    unread=("k", "v", "k_norm", "v_norm"),
)
_TEXT = Family(
    "Gemma4ForCausalLM",
    "gemma4_text",
    _NAMING,
    _KEYS,
    traits={
        "norm_order": "sandwich",
        "qk_norm": True,
        "v_norm": True,
        "layer_scale": True,
        "attention_scale": 1.0,
    },
    head_dim="required",
    positions="by layer",
    layers="gemma4",
    fixed={"use_bidirectional_attention": ("vision",)},  # among the tokens of an image: text has none
)
_PREFIX = "model.language_model."
_WHOLE = replace(
    _TEXT,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    inner="text_config",
    outer=frozenset(f"{what}_token_id" for what in ("image", "video", "audio", "boi", "eoi", "boa", "eoa"))
    | {"vision_config", "audio_config", "eoa_token_index", "vision_soft_tokens_per_image"},
    naming=replace(
        _NAMING,
        layer=_NAMING.layer.replace("model.", _PREFIX),
        modules={name: stored.replace("model.", _PREFIX) for name, stored in _NAMING.modules.items()},
        harmless=(*_NAMING.harmless, r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*"),
    ),
)
GEMMA4 = (_TEXT, _WHOLE)
