"""Every ModelSpec option against the oracle, in prefill, chunks and decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine.engine import Engine
from pdserve.engine.parts import Linear
from pdserve.engine.plan import Chunk, EngineConfig
from pdserve.engine.rope_scaling import proportional
from pdserve.engine.runnable import check_spec
from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.errors import CheckpointError
from tests.engine import oracle
from tests.engine.tiny import ROPE, prompt, run, spec, tiny_model

LLAMA3 = PositionScheme(
    kind="rope", theta=10000.0, dims=8, scaling="llama3", original_max_positions=16,
    scaling_parameters=(("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
)  # fmt: skip
LINEAR = replace(ROPE, scaling="linear", scaling_parameters=(("factor", 3.0),))
LEARNED = PositionScheme(kind="learned", dims=512)
ALIBI = PositionScheme(kind="alibi", dims=4)
NOTHING = LayerShape(0, 0, 8)  # of head_dim 8: canonical is 0, and any will do
EXPERTS = {"experts": 5, "active_experts": 2, "expert_width": 16}
BIASES = {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True, "head_bias": True, "projection_bias": True}
NONE = PositionScheme(kind="none")
CONVOLUTIONS = {
    "layer_shapes": (LayerShape(1, 1, 32, 3), LayerShape(4, 2, 8), LayerShape(1, 1, 32, 4)),
    "sliding_window": (3, 0, 4), "layer_positions": (NONE, ROPE, NONE),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "multi-head": {"kv_heads": 4},
    "one KV head, wide heads": {"kv_heads": 1, "head_dim": 24, "positions": replace(ROPE, dims=24)},
    "partial rotation": {"positions": replace(ROPE, dims=4)},
    "llama3": {"positions": LLAMA3},
    "no positions": {"positions": PositionScheme(kind="none")},
    "gpt2": {
        "positions": LEARNED, "norm": "layer", "norm_shift": True, "mlp": "plain", "activation": "gelu_tanh",
        "tied_head": True, **BIASES, "projection_bias": False,
    },
    "relu, unscaled": {"mlp": "plain", "activation": "relu", "norm_scale": False},
    "gated gelu": {"activation": "gelu", "final_norm": False},
    "q/k norm": {"qk_norm": True, "attention_scale": 0.7},
    "post-norm, projections": {
        "norm": "layer", "norm_shift": True, "norm_order": "post", "embed_width": 20, "out_width": 24, **BIASES,
        "mlp": "plain", "activation": "gelu", "final_norm": False,
    },
    "windows, soft cap": {"sliding_window": (0, 5, 1), "soft_cap": 2.0},
    "sandwich, offsets, two bases": {
        "norm_order": "sandwich", "norm_offset": 1.0, "qk_norm": True, "embed_scale": 5.5, "sliding_window": (4, 0, 4),
        "layer_positions": (replace(ROPE, theta=100.0), ROPE, replace(ROPE, theta=100.0)), "logit_soft_cap": 3.0,
    },
    "norms of what is added": {"norm_order": "branch", "qk_norm": True, "qk_norm_whole": True},
    "layers without positions": {"layer_positions": (ROPE, PositionScheme(kind="none"), ROPE)},
    "multipliers": {"embed_scale": 3.0, "residual_scale": 0.3, "attention_scale": 0.2, "logit_scale": 0.25},
    "parallel": {"parallel": True, "norm": "layer", "norm_shift": True, "mlp": "plain", **BIASES},
    "alibi": {"positions": ALIBI, "embed_norm": True, "kv_heads": 4, "sliding_window": (0, 7, 0)},
    "alibi, six heads, grouped": {"positions": replace(ALIBI, dims=6), "heads": 6, "soft_cap": 2.0},
    "experts": {**EXPERTS, "norm_experts": True},
    "experts, some layers dense": {**EXPERTS, "expert_width": 21, "dense_layers": (1,), "residual_scale": 0.5},
    "experts, one shared": {**EXPERTS, "shared_width": 11},
    "experts by sigmoids": {**EXPERTS, "sigmoid_router": True, "norm_experts": True},
    "experts with biases and limits, attention sinks": {
        **EXPERTS, "norm_experts": True, "expert_bias": True, "swiglu_alpha": 1.7, "swiglu_limit": 0.5,
        "attention_sinks": True, "sliding_window": (5, 0, 5), "qkv_bias": True,
    },
    "sinks of one KV head, soft cap": {"kv_heads": 1, "attention_sinks": True, "soft_cap": 2.0},
    "one norm, and one for each head": {
        "parallel": True, "one_norm": True, "norm": "layer", "norm_shift": True, "qk_norm": True, "qk_norm_each": True,
    },
    "offsets of layer norms, squared relu": {
        "norm": "layer", "norm_shift": True, "norm_offset": 1.0, "mlp": "plain", "activation": "relu2",
    },
    "linear": {"positions": LINEAR},
    "odd sizes": {"ffn_width": 37, "width": 30},
    "proportional": {"positions": proportional(100.0, 8, 3, 2.0)},
    "upper layers that read a lower one's cache": {
        "layers": 4, "kv_layers": (0, 1, 0, 1), "layer_ffn": (48, 48, 96, 96), "sliding_window": (5, 0, 5, 0),
        "qk_norm": True, "v_norm": True, "attention_scale": 1.0,
    },
    "keys that are values, inputs of each layer": {
        "key_is_value": (0, 2), "v_norm": True, "layer_input_width": 7, "layer_scale": True, "qkv_bias": True,
    },
    "experts beside the MLP": {
        **EXPERTS, "experts_beside": True, "norm_experts": True, "norm_order": "sandwich", "layer_scale": True,
    },
    "heads that differ": {
        "layer_shapes": (LayerShape(4, 2, 8), LayerShape(4, 1, 16), LayerShape(2, 2, 8)), "layer_ffn": (48, 21, 5),
        "sliding_window": (0, 5, 0), "qk_norm": True,
    },
    "short convolutions": {**CONVOLUTIONS, "conv_bias": True, "qk_norm": True, "layer_ffn": (48, 21, 0)},
    "layers without attention, without an MLP": {
        "layers": 5, "layer_ffn": (48, 0, 48, 0, 48), "qkv_bias": True,
        "layer_shapes": (NOTHING, LayerShape(4, 2, 8), LayerShape(4, 0, 8), LayerShape(2, 1, 8), NOTHING),
    },
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, deterministic: bool) -> None:
    model = tiny_model(spec(**OPTIONS[name]), "float64", seed=3)
    ids, pages = prompt(23, seed=1), (7, 2, 5, 0, 11, 3)
    expected = oracle.logits(model, ids)
    order = "nhd" if deterministic else "hnd"
    engine = Engine(
        model, EngineConfig(dtype="float64", pages=12, page_size=4, axis_order=order, deterministic=deterministic)
    )
    whole = run(engine, Chunk("a", ids, 0, pages, "all")).logits["a"]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)
    # chunks of unequal length, then one token at a time
    parts = [run(engine, Chunk("a", ids[a:b], a, pages, "all")).logits["a"] for a, b in ((0, 6), (6, 13), (13, 19))]
    parts += [run(engine, Chunk("a", ids[i : i + 1], i, pages)).logits["a"] for i in range(19, 23)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 0.06)])
def test_other_dtypes_stay_near_the_oracle(dtype: str, tolerance: float) -> None:
    model = tiny_model(spec(), dtype, seed=3)
    ids = prompt(23, seed=1)
    out = run(
        Engine(model, EngineConfig(dtype=dtype, pages=12, page_size=4)), Chunk("a", ids, 0, tuple(range(6)), "all")
    )
    assert out.logits["a"].dtype == torch.float32
    want = oracle.logits(model, ids)
    error = out.logits["a"].double() - want
    assert float(error.pow(2).mean().sqrt() / want.pow(2).mean().sqrt()) < tolerance


@pytest.mark.parametrize(
    "field, changes",
    [
        ("positions.kind", {"positions": PositionScheme(kind="sinusoidal")}),
        ("positions.dims", {"positions": PositionScheme(kind="alibi", dims=3)}),
        ("positions.scaling", {"positions": replace(ROPE, scaling="spiral")}),
        ("positions.scaling_parameters", {"positions": replace(ROPE, scaling="yarn")}),
        ("positions.original_max_positions", {"positions": replace(LLAMA3, original_max_positions=0)}),
        ("context_limit", {"positions": replace(LINEAR, scaling="dynamic", original_max_positions=64)}),
        ("layer_positions", {"layer_positions": (ROPE,)}),
        ("layer_positions", {"layer_positions": (ROPE,) * 3, "positions": PositionScheme(kind="none")}),
        ("positions.kind", {"layer_positions": (ROPE, ROPE, PositionScheme(kind="learned", dims=512))}),
        ("positions.scaling_parameters", {"positions": replace(ROPE, scaling="llama3")}),
        ("positions.interleaved", {"positions": replace(ROPE, interleaved=True)}),
        ("positions.keys_cached_rotated", {"positions": replace(ROPE, keys_cached_rotated=False)}),
        ("positions.dims", {"positions": replace(ROPE, dims=9)}),
        ("positions.theta", {"positions": replace(ROPE, theta=0.0)}),
        ("norm", {"norm": "batch"}),
        ("norm_order", {"norm_order": "double"}),
        ("mlp", {"mlp": "experts"}),
        ("activation", {"activation": "swish9"}),
        ("kv_heads", {"kv_heads": 3}),
        ("parallel", {"parallel": True, "norm_order": "sandwich"}),
        ("norm_offset", {"norm_offset": 1.0, "norm": "layer", "norm_scale": False}),
        ("norm_offset", {"norm_offset": 1.0, "norm_shift": True}),
        ("one_norm", {"one_norm": True}),
        ("qk_norm_whole", {"qk_norm_whole": True}),
        ("qk_norm_each", {"qk_norm_each": True}),
        ("qk_norm_each", {"qk_norm": True, "qk_norm_each": True, "qk_norm_whole": True}),
        ("shared_width", {"shared_width": 8}),
        ("expert_bias", {"expert_bias": True}),
        ("experts_beside", {**EXPERTS, "experts_beside": True}),
        ("experts_beside", {"experts_beside": True}),
        ("swiglu_alpha", {"swiglu_alpha": 1.7, "swiglu_limit": 7.0}),
        ("swiglu_limit", {**EXPERTS, "swiglu_alpha": 1.7}),
        ("sigmoid_router", {"sigmoid_router": True}),
        ("experts", {**EXPERTS, "mlp": "plain"}),
        ("mlp_bias", {**EXPERTS, "mlp_bias": True}),
        ("active_experts", {**EXPERTS, "active_experts": 6}),
        ("active_experts", {"active_experts": 1}),
        ("expert_width", {**EXPERTS, "expert_width": 0}),
        ("dense_layers", {**EXPERTS, "dense_layers": (3,)}),
        ("sliding_window", {"sliding_window": (4,)}),
        ("tied_head", {"tied_head": True, "out_width": 16}),
        ("context_limit", {"positions": PositionScheme(kind="learned", dims=100)}),
    ],
)
def test_unknown_options_are_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    of: ModelSpec = spec(**changes)
    with pytest.raises(CheckpointError) as error:
        Engine(tiny_model(of), EngineConfig(dtype="fp32", pages=4))
    assert error.value.field == field


@pytest.mark.parametrize(
    "field, changes",
    [
        ("layer_shapes", {"layer_shapes": (LayerShape(4, 2, 8),)}),
        ("layer_shapes", {"layer_shapes": (LayerShape(4, 3, 8),) * 3}),
        ("layer_shapes", {"layer_shapes": (LayerShape(4, 2, 8), LayerShape(4, 0, 4), LayerShape(4, 2, 8))}),
        ("layer_shapes", {"layer_shapes": (NOTHING,) * 3}),
        ("kv_layers", {"kv_layers": (0, 1)}),
        ("kv_layers", {"kv_layers": (0, 2, 2)}),
        ("kv_layers", {"kv_layers": (0, 0, 1)}),
        ("kv_layers", {"kv_layers": (0, 1, 3)}),
        ("kv_layers", {"kv_layers": (0, 1, 1), "layer_shapes": (LayerShape(4, 2, 8),) * 2 + (LayerShape(4, 1, 8),)}),
        ("key_is_value", {"key_is_value": (3,)}),
        ("layer_input_width", {"layer_input_width": -1}),
        ("layer_shapes", {**CONVOLUTIONS, "sliding_window": (3, 0, 3)}),
        ("layer_shapes", {**CONVOLUTIONS, "layer_positions": (ROPE,) * 3}),
        ("layer_shapes", {**CONVOLUTIONS, "width": 64}),
        ("layer_ffn", {"layer_ffn": (48, 48)}),
        ("layer_ffn", {"layer_ffn": (48, 48, -1)}),
        ("positions.dims", {"layer_shapes": (LayerShape(4, 2, 8), LayerShape(4, 2, 6), LayerShape(4, 2, 8))}),
        ("positions.kind", {"layer_shapes": (LayerShape(4, 4, 8),) * 2 + (LayerShape(4, 2, 8),), "positions": ALIBI}),
        ("norm_order", {"layer_ffn": (48, 0, 48), "norm_order": "sandwich"}),
    ],
)
def test_layers_that_do_not_fit_are_refused_before_a_tensor_is_asked_for(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        check_spec(spec(**changes))
    assert error.value.field == field


def test_two_engines_of_one_model_share_their_weights() -> None:
    model = tiny_model()
    a, b = (Engine(model, EngineConfig(dtype="fp32", pages=4)) for _ in range(2))
    for first, second in zip(a.decoder.layers, b.decoder.layers, strict=True):
        for one, other in ((first.qkv, second.qkv), (first.up, second.up)):
            assert isinstance(one, Linear) and isinstance(other, Linear)
            assert one.weight.data_ptr() == other.weight.data_ptr()
    qkv = a.decoder.layers[0].qkv
    assert isinstance(qkv, Linear)
    fused = qkv.weight.untyped_storage().data_ptr()
    assert {model.tensors[f"layers.0.{x}.weight"].untyped_storage().data_ptr() for x in "qkv"} == {fused}
