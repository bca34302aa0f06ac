"""The parts of a decoder, made of the canonical tensors that weights.py lists."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.convolution import Convolution
from pdserve.engine.dtypes import wide
from pdserve.engine.experts import Expert, Experts
from pdserve.engine.layer_extras import Beside, LayerInputs, OwnInput
from pdserve.engine.packing import TensorMap, aligned, fuse
from pdserve.engine.parts import Linear, Norm, Product, QuantizedLinear
from pdserve.engine.quantize import quantize
from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.engine.weights import kept, layer_norms, qk_norm_size


@dataclass(frozen=True)
class Layer:
    """What norm_order or the layer's shape leaves out is None; a layer has `up` and `down`, experts, or neither."""

    shape: LayerShape
    attn_norm: Norm | None  # before attention (post: after it)
    qkv: Product | None  # width -> (Hq + 2 Hkv) * d; without what the layer does not make
    conv: Convolution | None  # in attention's place; qkv makes its two gates and their input
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    sinks: Tensor | None  # [Hkv, group], scores of the attention sinks
    o: Product | None  # Hq * d -> width
    attn_out_norm: Norm | None  # of what attention adds
    mlp_norm: Norm | None  # before the MLP (post: after it); of one_norm attention's
    up: Product | None  # width -> ffn, or gate and up stacked: width -> 2 ffn
    down: Product | None  # ffn -> width
    experts: Experts | None  # in the MLP's place
    beside: Beside | None  # experts, with the MLP
    mlp_out_norm: Norm | None  # of what the MLP adds
    own_input: OwnInput | None
    scale: Tensor | None  # [1], of the layer's output


class Builder:
    """Makes parts for one decoder.

    q, k, v and gate, up become fused; where the mapping of tensors is mutable its entries become views of the fused
    storage, so that nothing is held twice.
    """

    def __init__(self, spec: ModelSpec, tensors: TensorMap, tiled: bool, quantized: bool) -> None:
        """tiled: deterministic mode; quantized: matrices become int8."""
        self._spec, self._tensors, self._tiled, self._quantized = spec, tensors, tiled, quantized

    def layer(self, index: int) -> Layer:
        spec, prefix, shape = self._spec, f"layers.{index}.", self._spec.shape_of(index)
        norms = {name: self.norm(f"{prefix}{name}", spec.width) for name in layer_norms(spec, index)}
        experts = self._experts(prefix) if spec.has_experts(index) else None
        has_mlp = spec.ffn_of(index) > 0 and (experts is None or spec.experts_beside)
        up = ("gate", "up") if spec.mlp == "gated" else ("up",)
        attends, inputs = shape.kv_heads > 0 and not shape.kernel, ("q", *kept(spec, index))
        if shape.kernel:
            inputs = ("conv_in",)
        return Layer(
            shape=shape,
            attn_norm=norms.get("attn_norm"),
            qkv=self.linear(*(f"{prefix}{name}" for name in inputs)) if shape.kv_heads else None,
            conv=self._convolution(f"{prefix}conv") if shape.kernel else None,
            q_norm=self._qk_norm(f"{prefix}q_norm", shape, shape.heads) if attends else None,
            k_norm=self._qk_norm(f"{prefix}k_norm", shape, shape.kv_heads) if attends and spec.has_kv(index) else None,
            v_norm=Norm("rms", shape.head_dim, spec.norm_eps, None, None) if spec.v_norm else None,
            sinks=self.tensor(f"{prefix}sinks").view(shape.kv_heads, -1)
            if spec.attention_sinks and shape.kv_heads
            else None,
            o=self.linear(f"{prefix}{'conv_out' if shape.kernel else 'o'}") if shape.heads else None,
            attn_out_norm=norms.get("attn_out_norm"),
            mlp_norm=norms.get("attn_norm" if spec.one_norm else "mlp_norm"),
            up=self.linear(*(f"{prefix}{name}" for name in up)) if has_mlp else None,
            down=self.linear(f"{prefix}down") if has_mlp else None,
            experts=None if spec.experts_beside else experts,
            beside=self._beside(prefix, experts) if experts is not None and spec.experts_beside else None,
            mlp_out_norm=norms.get("mlp_out_norm"),
            own_input=self._own_input(prefix) if spec.layer_input_width else None,
            scale=self.tensor(f"{prefix}layer_scale.scale") if spec.layer_scale else None,
        )

    def layer_inputs(self) -> LayerInputs:
        width, table = self._spec.layer_input_width, self.tensor("layer_embed")
        scale = torch.tensor(width**0.5, dtype=table.dtype)  # rounded, as the peer does
        return LayerInputs(table, self.linear("layer_in"), self.norm("layer_in_norm", width), scale)

    def norm(self, name: str, width: int) -> Norm:
        spec = self._spec
        scale = self._scale(name) if spec.norm_scale else None
        shift = self.tensor(f"{name}.shift") if spec.norm_shift else None
        return Norm(spec.norm, width, spec.norm_eps, scale, shift)

    def linear(self, *names: str) -> Product:
        """One projection, or several of the same input stacked into one."""
        weight = fuse(self._tensors, [f"{name}.weight" for name in names])
        bias = fuse(self._tensors, [f"{name}.bias" for name in names]) if f"{names[0]}.bias" in self._tensors else None
        return self.product(weight, bias)

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        return QuantizedLinear(*quantize(weight), bias) if self._quantized else self._exact(weight, bias)

    def tensor(self, name: str) -> Tensor:
        tensor = aligned(self._tensors[name])
        if isinstance(self._tensors, MutableMapping):
            self._tensors[name] = tensor
        return tensor

    def _experts(self, prefix: str) -> Experts:
        """The router keeps its precision in int8, too: a near tie must not choose another expert."""
        spec, router = self._spec, self.tensor(f"{prefix}router.weight")
        shared, shared_gate = self._shared_expert(prefix) if spec.shared_width else (None, None)
        bias = self.tensor(f"{prefix}router.bias") if spec.expert_bias else None
        parts = [self._expert_parts(f"{prefix}expert_{name}") for name in ("gate", "up", "down")]
        return Experts(
            self._exact(router, bias),
            tuple(Expert(*each) for each in zip(*parts, strict=True)),
            spec.active_experts,
            spec.norm_experts,
            self._tiled,
            shared,
            shared_gate,
            self._wide(f"{prefix}router_correction.bias") if spec.sigmoid_router else None,
            self._wide(f"{prefix}expert_gains.scale") if spec.experts_beside else None,
        )

    def _expert_parts(self, name: str) -> list[Product]:
        """One matrix of each expert."""
        weights = self.tensor(f"{name}.weight")
        biases = self.tensor(f"{name}.bias") if self._spec.expert_bias else [None] * len(weights)
        return [self.product(aligned(w), b) for w, b in zip(weights, biases, strict=True)]

    def _shared_expert(self, prefix: str) -> tuple[Expert, Product]:
        """With its gate, which keeps its precision as the router does."""
        gate = self.tensor(f"{prefix}shared_router.weight")
        parts = (self.linear(f"{prefix}shared_{name}") for name in ("gate", "up", "down"))
        return Expert(*parts), self._exact(gate, None)

    def _beside(self, prefix: str, experts: Experts) -> Beside:
        spec = self._spec
        names = ("beside_mlp_norm", "beside_norm", "beside_out_norm")
        mlp_norm, norm, out_norm = (self.norm(f"{prefix}{name}", spec.width) for name in names)
        scale = self._wide(f"{prefix}router_norm.scale") * spec.width**-0.5
        return Beside(experts, mlp_norm, norm, out_norm, Norm("rms", spec.width, spec.norm_eps, scale, None))

    def _convolution(self, name: str) -> Convolution:
        return Convolution(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if self._spec.conv_bias else None)

    def _own_input(self, prefix: str) -> OwnInput:
        norm = self.norm(f"{prefix}input_norm", self._spec.width)
        return OwnInput(self.linear(f"{prefix}input_gate"), self.linear(f"{prefix}input_proj"), norm)

    def _qk_norm(self, name: str, shape: LayerShape, heads: int) -> Norm | None:
        spec = self._spec
        if not spec.qk_norm:
            return None
        width = qk_norm_size(spec, shape, heads)[-1]
        return Norm("heads" if spec.qk_norm_each else "rms", width, spec.norm_eps, self._scale(name), None)

    def _scale(self, name: str) -> Tensor:
        scale, offset = self.tensor(f"{name}.scale"), self._spec.norm_offset
        return scale if not offset else scale.to(wide(scale.dtype)) + offset

    def _wide(self, name: str) -> Tensor:
        tensor = self.tensor(name)
        return tensor.to(wide(tensor.dtype))

    def _exact(self, weight: Tensor, bias: Tensor | None) -> Product:
        """A product that stays as it is in int8."""
        return deterministic.PaddedLinear(weight, bias) if self._tiled else Linear(weight, bias)
