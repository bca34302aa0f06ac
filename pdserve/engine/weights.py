"""The canonical tensors of a ModelSpec: names and shapes. Loaders produce exactly these.

Matrices are [outputs, inputs]. Rotary pairs are (i, i + dims/2); a loader whose source
pairs neighbours (GGUF's Llama) reorders the rows of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
_AGAIN = "get the model's files again, or convert it again; spec and tensors belong together"

# Which of a layer's norms each order has.
NORMS: Mapping[str, tuple[str, ...]] = {
    "pre": ("attn_norm", "mlp_norm"),
    "post": ("attn_norm", "mlp_norm"),
    "branch": ("attn_out_norm", "mlp_out_norm"),
    "sandwich": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
}


def layer_norms(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The norms that a layer has, without those of q and k: none of what it does not compute."""
    absent = {"attn": not spec.shape_of(layer).heads, "mlp": not spec.ffn_of(layer) and not spec.has_experts(layer)}
    names = (name for name in NORMS.get(spec.norm_order, ()) if not absent[name.split("_")[0]])
    return tuple(name for name in names if not (spec.one_norm and name == "mlp_norm"))


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
    if spec.layer_input_width:
        inputs = spec.layers * spec.layer_input_width
        shapes["layer_embed"] = (spec.vocab_size, inputs)
        _linear(shapes, "layer_in", inputs, spec.width, False)
        _norm(shapes, "layer_in_norm", spec.layer_input_width, spec)
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_tensors(spec, layer).items()}
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
            raise CheckpointError(
                f"tensor {name} {list(shape)} is missing", field=name, reason="MISSING_TENSOR", remedy=_AGAIN
            )
        if tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape)
            raise CheckpointError(
                f"tensor {name} is {found}, expected {list(shape)}",
                field=name,
                reason="TENSOR_SHAPE",
                remedy=_AGAIN,
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise CheckpointError(f"tensor {unknown[0]} belongs to no part of the model", field=unknown[0], remedy=_AGAIN)


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Those of one layer, without its prefix. Layers with the same compute the same, but for windows and positions."""
    shapes: dict[str, Shape] = {}
    for name in layer_norms(spec, layer):
        _norm(shapes, name, spec.width, spec)
    return shapes | _attention_tensors(spec, layer) | _feed_forward_tensors(spec, layer) | _extra_tensors(spec)


def _attention_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    shape, shapes = spec.shape_of(layer), dict[str, Shape]()
    if shape.kernel:
        return _convolution_tensors(spec, shape)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.kv_heads:
        _linear(shapes, "q", q, spec.width, spec.qkv_bias)
        for name in kept(spec, layer):
            _linear(shapes, name, kv, spec.width, spec.qkv_bias)
        if spec.qk_norm:
            for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads))[: 2 if spec.has_kv(layer) else 1]:
                shapes[f"{name}.scale"] = qk_norm_size(spec, shape, heads)
        if spec.attention_sinks:
            shapes["sinks"] = (shape.heads,)
    if shape.heads:
        _linear(shapes, "o", spec.width, q, spec.attn_out_bias)
    return shapes


def _convolution_tensors(spec: ModelSpec, shape: LayerShape) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    _linear(shapes, "conv_in", 3 * shape.head_dim, spec.width, spec.conv_bias)
    shapes["conv.weight"] = (shape.head_dim, shape.kernel)
    if spec.conv_bias:
        shapes["conv.bias"] = (shape.head_dim,)
    _linear(shapes, "conv_out", spec.width, shape.head_dim, spec.conv_bias)
    return shapes


def qk_norm_size(spec: ModelSpec, shape: LayerShape, heads: int) -> Shape:
    """Of the scale of the norm of so many heads."""
    if spec.qk_norm_each:
        return heads, shape.head_dim
    return (shape.head_dim * (heads if spec.qk_norm_whole else 1),)


def kept(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The products of this layer that make what it caches."""
    if not spec.has_kv(layer):
        return ()
    return ("k",) if layer in spec.key_is_value else ("k", "v")


def _feed_forward_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    if not spec.has_experts(layer):
        return _mlp_tensors(spec, layer)
    return _expert_tensors(spec) | (_mlp_tensors(spec, layer) | _beside_tensors(spec) if spec.experts_beside else {})


def _mlp_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    width = spec.ffn_of(layer)
    if not width:
        return shapes
    if spec.mlp == "gated":
        _linear(shapes, "gate", width, spec.width, spec.mlp_bias)
    _linear(shapes, "up", width, spec.width, spec.mlp_bias)
    _linear(shapes, "down", spec.width, width, spec.mlp_bias)
    return shapes


def _beside_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Of experts beside the MLP: norms of either side, what the router reads by, a factor on each expert."""
    shapes: dict[str, Shape] = {"router_norm.scale": (spec.width,), "expert_gains.scale": (spec.experts,)}
    for name in ("beside_mlp_norm", "beside_norm", "beside_out_norm"):
        _norm(shapes, name, spec.width, spec)
    return shapes


def _extra_tensors(spec: ModelSpec) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if spec.layer_input_width:
        _linear(shapes, "input_gate", spec.layer_input_width, spec.width, False)
        _linear(shapes, "input_proj", spec.width, spec.layer_input_width, False)
        _norm(shapes, "input_norm", spec.width, spec)
    if spec.layer_scale:
        shapes["layer_scale.scale"] = (1,)
    return shapes


def _expert_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """The experts of a layer are stacked: [experts, outputs, inputs]."""
    shapes: dict[str, Shape] = {
        "router.weight": (spec.experts, spec.width),
        "expert_gate.weight": (spec.experts, spec.expert_width, spec.width),
        "expert_up.weight": (spec.experts, spec.expert_width, spec.width),
        "expert_down.weight": (spec.experts, spec.width, spec.expert_width),
    }
    if spec.expert_bias:
        biases = {name.replace(".weight", ".bias"): shape[:-1] for name, shape in shapes.items()}
        shapes |= biases
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
