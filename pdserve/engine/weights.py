"""The canonical tensors of a ModelSpec: names and shapes. Loaders produce exactly these.

Matrices are [outputs, inputs]. Rotary pairs are (i, i + dims/2); a loader whose source
pairs neighbours (GGUF's Llama) reorders the rows of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# Which of a layer's norms each order has.
NORMS: Mapping[str, tuple[str, ...]] = {
    "pre": ("attn_norm", "mlp_norm"),
    "post": ("attn_norm", "mlp_norm"),
    "branch": ("attn_out_norm", "mlp_out_norm"),
    "sandwich": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
}


def layer_norms(spec: ModelSpec) -> tuple[str, ...]:
    """The norms that a layer of this spec has, without those of q and k."""
    return tuple(name for name in NORMS.get(spec.norm_order, ()) if not (spec.one_norm and name == "mlp_norm"))


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name -> shape of every tensor that a model of this spec needs."""
    embed_width, out_width = spec.embed_width or spec.width, spec.out_width or spec.width
    shapes: dict[str, Shape] = {"embed": (spec.vocab_size, embed_width)}
    if spec.positions.kind == "learned":
        shapes["pos"] = (spec.positions.dims, spec.width)
    if spec.embed_norm:
        _norm(shapes, "embed_norm", spec.width, spec)
    if spec.embed_width:
        _linear(shapes, "in_proj", spec.width, embed_width, spec.projection_bias)
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(spec, layer).items()}
    if spec.final_norm:
        _norm(shapes, "final_norm", spec.width, spec)
    if spec.out_width:
        _linear(shapes, "out_proj", out_width, spec.width, spec.projection_bias)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, out_width)
    if spec.head_bias:
        shapes["head.bias"] = (spec.vocab_size,)
    return shapes


def check_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError naming the first tensor that is missing, unknown or misshapen."""
    expected = expected_tensors(spec)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} {list(shape)} is missing", field=name, reason="MISSING_TENSOR")
        if tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape)
            raise CheckpointError(
                f"tensor {name} is {found}, expected {list(shape)}", field=name, reason="TENSOR_SHAPE"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise CheckpointError(f"tensor {unknown[0]} belongs to no part of the model", field=unknown[0])


def _layer_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {}
    for name in layer_norms(spec):
        _norm(shapes, name, spec.width, spec)
    _linear(shapes, "q", q, spec.width, spec.qkv_bias)
    _linear(shapes, "k", kv, spec.width, spec.qkv_bias)
    _linear(shapes, "v", kv, spec.width, spec.qkv_bias)
    if spec.qk_norm:
        for name, heads in (("q_norm", spec.heads), ("k_norm", spec.kv_heads)):
            shapes[f"{name}.scale"] = (heads, spec.head_dim) if spec.qk_norm_each else (_qk_norm_width(spec, heads),)
    _linear(shapes, "o", spec.width, q, spec.attn_out_bias)
    return shapes | (_expert_tensors(spec) if spec.has_experts(layer) else _mlp_tensors(spec))


def _qk_norm_width(spec: ModelSpec, heads: int) -> int:
    return spec.head_dim * (heads if spec.qk_norm_whole else 1)


def _mlp_tensors(spec: ModelSpec) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if spec.mlp == "gated":
        _linear(shapes, "gate", spec.ffn_width, spec.width, spec.mlp_bias)
    _linear(shapes, "up", spec.ffn_width, spec.width, spec.mlp_bias)
    _linear(shapes, "down", spec.width, spec.ffn_width, spec.mlp_bias)
    return shapes


def _expert_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """The experts of a layer are stacked: [experts, outputs, inputs]."""
    shapes: dict[str, Shape] = {
        "router.weight": (spec.experts, spec.width),
        "expert_gate.weight": (spec.experts, spec.expert_width, spec.width),
        "expert_up.weight": (spec.experts, spec.expert_width, spec.width),
        "expert_down.weight": (spec.experts, spec.width, spec.expert_width),
    }
    if spec.sigmoid_router:
        shapes["router_correction.bias"] = (spec.experts,)
    if spec.shared_width:
        _linear(shapes, "shared_router", 1, spec.width, False)
        _linear(shapes, "shared_gate", spec.shared_width, spec.width, False)
        _linear(shapes, "shared_up", spec.shared_width, spec.width, False)
        _linear(shapes, "shared_down", spec.width, spec.shared_width, False)
    return shapes


def _linear(shapes: dict[str, Shape], name: str, outputs: int, inputs: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: dict[str, Shape], name: str, width: int, spec: ModelSpec) -> None:
    if spec.norm_scale:
        shapes[f"{name}.scale"] = (width,)
    if spec.norm_shift:
        shapes[f"{name}.shift"] = (width,)
