"""How LFM2's configurations tell attention from convolutions, and the width of an MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.hf_config import find_family, spec_from_config
from pdserve.engine.load import load_model
from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.gguf_writing import write_gguf

# The keys of LFM2-1.2B's config.json.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
    "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048,
    "conv_use_xavier_init": True, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
    "initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip


def read(**changes: Any) -> ModelSpec:
    config = {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not ...}
    return spec_from_config(find_family(config, "here"), config, {}, "here")


def test_a_published_configuration() -> None:
    spec = read()
    attends = [layer for layer in range(16) if not spec.shape_of(layer).kernel]
    assert attends == [2, 5, 8, 10, 12, 14] and spec.shape_of(2) == LayerShape(32, 8, 64)
    assert spec.shape_of(0) == LayerShape(1, 1, 2048, 3) and spec.window(0) == 3 and spec.window(2) == 0
    assert spec.ffn_width == 8192 and spec.tied_head and spec.positions.theta == 1e6
    assert read(block_ffn_dim_multiplier=1.01).ffn_width == 8448  # 8273, up to a multiple of 256


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("full_attn_idxs", {"full_attn_idxs": [2, 16]}),
        ("full_attn_idxs", {"layer_types": ["conv"] * 15 + ["full_attention"]}),
        ("layer_types", {"full_attn_idxs": ..., "layer_types": ["conv"] * 15 + ["mamba"]}),
        ("layer_types", {"full_attn_idxs": ..., "layer_types": ["full_attention"] * 3}),
        ("block_use_swiglu", {"block_use_swiglu": False}),
        ("block_ff_dim", {"intermediate_size": 4096}),
        ("conv_kernel", {"conv_kernel": 4}),
    ],
)
def test_what_it_would_compute_otherwise_is_refused_by_key(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    assert error.value.field == key


@pytest.mark.parametrize("heads", [[0, 2, 0], [0, 2, 4, 0], [0, 0, 0, 0]])
def test_lists_of_kv_heads_that_make_no_model_are_refused(heads: list[int], tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("lfm2"), tmp_path / "tiny.gguf", metadata={"lfm2.attention.head_count_kv": heads})
    with pytest.raises(CheckpointError) as error:
        load_model(path, "fp32")
    assert error.value.field == "lfm2.attention.head_count_kv"
