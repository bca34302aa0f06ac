"""config.json: the spellings that mean the same, and every key that must be refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.load import load_model
from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError
from tests.engine.loading import peer_rows
from tests.engine.loading.directories import ABSENT, directory, edit_json

LINEAR_LAYER = ["full_attention", "linear_attention", "full_attention"]
WINDOWED = {"use_sliding_window": True, "sliding_window": 5}


PHI4 = {key: peer_rows.longrope(6)["rope_parameters"][key] for key in ("short_factor", "long_factor")}


def spec_of(path: Path) -> ModelSpec:
    return load_model(path, "fp32").spec


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_parameters": ABSENT, "rope_theta": 10000.0}),
        ("llama", {"rope_parameters": ABSENT}),  # older files have no key and mean 10000
        ("llama", {"rope_parameters": ABSENT, "rope_theta": 10000, "rope_scaling": None}),
        ("llama", {"rope_parameters": {"rope_theta": 10000.0, "type": "default"}}),
        ("llama", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
        ("llama", {"architectures": None}),
        ("llama-derived-head-dim", {"head_dim": ABSENT}),
        ("llama-derived-head-dim", {"head_dim": None}),
        ("llama3-scaled", {"rope_parameters": ABSENT, "rope_theta": 10000.0, "rope_scaling": peer_rows.LLAMA3}),
        (
            "llama3-scaled",
            {
                "rope_parameters": ABSENT,
                "rope_theta": 10000.0,
                "rope_scaling": {
                    "type": "llama3",
                    **{key: value for key, value in peer_rows.LLAMA3.items() if key not in ("rope_type", "rope_theta")},
                },
            },
        ),
        ("qwen2-windows", {"layer_types": ABSENT}),  # then max_window_layers decides
        ("gpt2", {"n_inner": 160, "tie_word_embeddings": ABSENT}),
        ("gpt2", {"n_ctx": 64}),
        ("phi3-longrope", {
            "rope_parameters": ABSENT,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {**PHI4, "type": "su"},
        }),
        ("gemma2", {"layer_types": ABSENT, "hidden_act": "gelu_pytorch_tanh"}),
        ("gemma3", {
            "layer_types": ABSENT,
            "_sliding_window_pattern": ABSENT,
            "sliding_window_pattern": 2,
            "rope_parameters": ABSENT,
            "rope_theta": 50000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        }),
        ("smollm3", {"no_rope_layers": ABSENT, "layer_types": ABSENT}),
        ("qwen3-moe", {"num_local_experts": ABSENT, "num_experts": 5, "max_window_layers": 3}),
        ("gpt-neox", {"rope_parameters": ABSENT, "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("bloom", {"hidden_size": ABSENT, "n_embed": 40, "seq_length": 2048, "n_inner": None}),
    ],
)  # fmt: skip
def test_spelling_means_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = directory(tmp_path, name)
    before = spec_of(path)
    edit_json(path, changes)
    assert spec_of(path) == before


def test_rope_theta_is_read_from_either_place(tmp_path: Path) -> None:
    path = directory(tmp_path)
    edit_json(path, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert spec_of(path).positions.theta == 500.0
    edit_json(path, {"rope_parameters": ABSENT, "rope_theta": 600.0})
    assert spec_of(path).positions.theta == 600.0


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**WINDOWED, "layer_types": ABSENT, "max_window_layers": 2}, (0, 0, 5)),
        ({**WINDOWED, "layer_types": ABSENT, "max_window_layers": 0}, (5, 5, 5)),
        ({**WINDOWED, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (5, 0, 0)),
        ({**WINDOWED, "use_sliding_window": False, "layer_types": ABSENT, "max_window_layers": 0}, ()),
    ],
)
def test_qwen_window_rules(changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    path = directory(tmp_path, "qwen2")
    edit_json(path, changes)
    assert spec_of(path).sliding_window == windows


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        (2, ABSENT, (2,)),
        ([2, 5], ABSENT, (2, 5)),
        (ABSENT, 7, (7,)),
        (None, [7, 8], (7, 8)),
        (2, [2, 8], (2, 8)),
        (None, ABSENT, ()),
    ],
)
def test_end_tokens(config: Any, generation: Any, eos: tuple[int, ...], tmp_path: Path) -> None:
    path = directory(tmp_path)
    edit_json(path, {"eos_token_id": config})
    edit_json(path, {"eos_token_id": generation}, "generation_config.json")
    assert spec_of(path).eos_ids == eos


def test_end_tokens_without_a_generation_config(tmp_path: Path) -> None:
    path = directory(tmp_path)
    (path / "generation_config.json").unlink()
    assert (spec_of(path).bos_id, spec_of(path).eos_ids) == (1, (2,))


ORIGINAL = "original_max_position_embeddings"
OTHER = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "field", "reason"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architectures", "UNKNOWN_ARCHITECTURE"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures", "UNKNOWN_ARCHITECTURE"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures", "UNKNOWN_ARCHITECTURE"),
        ("llama", {"architectures": []}, "architectures", "UNKNOWN_ARCHITECTURE"),
        ("llama", {"architectures": None, "model_type": "mamba"}, "model_type", "UNKNOWN_ARCHITECTURE"),
        ("llama", {"model_type": "qwen2"}, "model_type", "UNKNOWN_ARCHITECTURE"),
        ("llama", {"rope_parameters": OTHER}, "rope_type", "UNKNOWN_ROPE_TYPE"),
        ("llama", {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear"}}, "factor", "MISSING_KEY"),
        ("llama", {"rope_parameters": {"type": "mrope", "rope_type": "default"}}, "type", "UNSUPPORTED_KEY"),
        ("llama", {"rope_parameters": {"mystery": 1}}, "mystery", "UNKNOWN_KEY"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "UNSUPPORTED_KEY"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "UNSUPPORTED_KEY"),
        ("llama", {"rope_theta": 5.0}, "rope_theta", "UNSUPPORTED_KEY"),  # rope_parameters says 10000
        ("llama", {"rope_scaling": LINEAR}, "rope_scaling", "UNSUPPORTED_KEY"),
        ("llama", {"rope_parameters": "default"}, "rope_parameters", "UNSUPPORTED_KEY"),
        ("llama3-scaled", {"rope_parameters": {"rope_type": "llama3"}}, ORIGINAL, "MISSING_KEY"),
        (
            "llama3-scaled",
            {"rope_parameters": {**peer_rows.LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor",
            "BAD_VALUE",
        ),
        ("minimax-m2", {"rotary_dim": 4}, "rotary_dim", "UNSUPPORTED_KEY"),
        ("falcon", {"alibi": True}, "alibi", "UNSUPPORTED_KEY"),
        ("falcon", {"parallel_attn": False}, "parallel_attn", "UNSUPPORTED_KEY"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn", "UNSUPPORTED_KEY"),
        ("qwen2-moe", {"use_sliding_window": True}, "use_sliding_window", "UNSUPPORTED_KEY"),
        ("llama", {"mystery_gate": True}, "mystery_gate", "UNKNOWN_KEY"),
        ("llama", {"sliding_window": 8}, "sliding_window", "UNKNOWN_KEY"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config", "UNKNOWN_KEY"),
        ("qwen2", {"attention_bias": True}, "attention_bias", "UNKNOWN_KEY"),
        ("llama", {"hidden_act": "mish"}, "hidden_act", "UNSUPPORTED_KEY"),
        ("llama", {"hidden_size": ABSENT}, "hidden_size", "MISSING_KEY"),
        ("llama", {"rms_norm_eps": ABSENT}, "rms_norm_eps", "MISSING_KEY"),
        ("qwen3", {"head_dim": ABSENT}, "head_dim", "MISSING_KEY"),
        ("llama", {"hidden_size": "40"}, "hidden_size", "BAD_VALUE"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers", "BAD_VALUE"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers", "BAD_VALUE"),
        ("llama", {"num_hidden_layers": 10**15}, "num_hidden_layers", "BAD_VALUE"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps", "BAD_VALUE"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id", "BAD_VALUE"),
        ("llama", {"num_key_value_heads": 3}, "kv_heads", "UNSUPPORTED_MODEL"),
        ("llama", {"bos_token_id": 61}, "bos_id", "BAD_SPEC"),
        ("gpt2", {"n_head": 6}, "n_head", "UNSUPPORTED_KEY"),
        ("mistral", {"sliding_window": ABSENT}, "sliding_window", "MISSING_KEY"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": ABSENT}, "sliding_window", "MISSING_KEY"),
        ("mistral", {"sliding_window": 0}, "sliding_window", "BAD_VALUE"),
        ("qwen2", {"layer_types": LINEAR_LAYER}, "layer_types", "UNSUPPORTED_KEY"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types", "UNSUPPORTED_KEY"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types", "UNSUPPORTED_KEY"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "UNSUPPORTED_KEY"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention", "UNSUPPORTED_KEY"),
        ("gpt2", {"n_ctx": 32}, "n_ctx", "UNSUPPORTED_KEY"),
        ("llama-linear", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor", "BAD_VALUE"),
        ("llama-dynamic", {"rope_parameters": {"rope_type": "dynamic"}}, "factor", "MISSING_KEY"),
        ("llama-yarn", {ORIGINAL: 17}, ORIGINAL, "UNSUPPORTED_KEY"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type", "UNKNOWN_ROPE_TYPE"),
        ("phi3-longrope", {"rope_parameters": peer_rows.longrope(5)["rope_parameters"]}, "short_factor", "BAD_VALUE"),
        ("phi3", {"attention_bias": True}, "attention_bias", "UNSUPPORTED_KEY"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers", "UNSUPPORTED_KEY"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier", "BAD_VALUE"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv", "UNKNOWN_KEY"),
        ("gemma2", {"attn_logit_softcapping": ABSENT}, "attn_logit_softcapping", "MISSING_KEY"),
        ("gemma2", {"hidden_act": "relu"}, "hidden_act", "UNSUPPORTED_KEY"),
        ("gemma2", {"sliding_window": None}, "layer_types", "UNSUPPORTED_KEY"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "UNSUPPORTED_KEY"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "UNSUPPORTED_KEY"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "other": {}}}, "other", "UNKNOWN_KEY"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers", "UNSUPPORTED_KEY"),
        ("qwen3-moe", {"num_experts": 4}, "num_local_experts", "UNSUPPORTED_KEY"),  # which says 5
        ("qwen3-moe", {"num_experts_per_tok": 6}, "active_experts", "UNSUPPORTED_MODEL"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size", "UNKNOWN_KEY"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm", "UNSUPPORTED_KEY"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm",
         "UNSUPPORTED_KEY"),
        ("bloom", {"n_embed": 41}, "n_embed", "UNSUPPORTED_KEY"),
        ("gpt-neox", {"rotary_pct": 0.5}, "rotary_pct", "UNSUPPORTED_KEY"),  # rope_parameters says 0.25
    ],
)  # fmt: skip
def test_config_is_refused_by_name(name: str, changes: dict[str, Any], field: str, reason: str, tmp_path: Path) -> None:
    path = directory(tmp_path, name)
    edit_json(path, changes)
    with pytest.raises(CheckpointError, match=field) as caught:
        load_model(path, "fp32")
    assert (caught.value.field, caught.value.reason) == (field, reason)
