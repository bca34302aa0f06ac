"""The decoder itself: everything but attention works row by row on [T, ...] tensors.

T counts the tokens of a step, of all its sequences. One layer of a pre-norm model:

    q, k, v = attention_inputs(layer, x)      norm, projection, q/k norm, rotation
    o       = attention over the cache        (engine.py: k and v are written first)
    x       = attention_output(layer, x, o)   x + o Wo, then x + mlp(norm(x))

Other placements of the norms (spec.py draws them) differ in which norms a layer has and what they are applied to.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.adapters import Add
from pdserve.engine.dtypes import wide
from pdserve.engine.experts import Expert, Experts
from pdserve.engine.packing import TensorMap, aligned, fuse
from pdserve.engine.parts import ACTIVATIONS, Linear, Norm, Product, QuantizedLinear
from pdserve.engine.positions import rotate
from pdserve.engine.quantize import quantize
from pdserve.engine.runnable import check_spec
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import layer_norms


@dataclass(frozen=True)
class Layer:
    """Norms that the spec's norm_order does not have are None; a layer has `up` and `down`, or experts."""

    attn_norm: Norm | None  # before attention (post: after it)
    qkv: Product  # width -> (Hq + 2 Hkv) * d
    q_norm: Norm | None
    k_norm: Norm | None
    o: Product  # Hq * d -> width
    attn_out_norm: Norm | None  # of what attention adds
    mlp_norm: Norm | None  # before the MLP (post: after it); of one_norm attention's
    up: Product | None  # width -> ffn, or gate and up stacked: width -> 2 ffn
    down: Product | None  # ffn -> width
    experts: Experts | None
    mlp_out_norm: Norm | None  # of what the MLP adds


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _adapted(add: Add | None, product: str, x: Tensor, y: Tensor) -> Tensor:
    """A product's output y of x, with what adapters add to it."""
    return y if add is None else add(product, x, y)


class Decoder:
    """A ModelSpec with its weights. Holds no state besides them.

    `tensors` are the canonical ones; q, k, v and gate, up are stored fused, and where the
    mapping is mutable its entries become views of the fused storage, so that nothing is held
    twice.
    """

    def __init__(self, spec: ModelSpec, tensors: TensorMap, *, tiled: bool = False, quantized: bool = False) -> None:
        check_spec(spec)
        self.spec = spec
        self.tiled, self.quantized = tiled, quantized
        self._tensors: TensorMap = tensors
        self.trainable = any(tensor.requires_grad for tensor in tensors.values())
        width = spec.width
        self.embedding = self._tensor("embed")
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.embedding.dtype)  # rounded, as the peer does
        self.embed_norm = self._norm("embed_norm", width) if spec.embed_norm else None
        self.position_table = self._tensor("pos") if spec.positions.kind == "learned" else None
        self.in_proj = self._linear("in_proj") if spec.embed_width else None
        self.layers = [self._layer(index, f"layers.{index}.") for index in range(spec.layers)]
        self.final_norm = self._norm("final_norm", width) if spec.final_norm else None
        self.out_proj = self._linear("out_proj") if spec.out_width else None
        self.head = self._product(
            self.embedding if spec.tied_head else self._tensor("head.weight"),
            self._tensor("head.bias") if spec.head_bias else None,
        )
        self._tensors = {}  # keep no second reference to what was fused

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [T] -> x [T, width]."""
        x = self.embedding[ids]
        if self.spec.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.in_proj is not None:
            x = self.in_proj(x)
        if self.position_table is not None:
            x = x + self.position_table[positions]
        return _normed(self.embed_norm, x)

    def attention_inputs(
        self, index: int, x: Tensor, cos: Tensor, sin: Tensor, add: Add | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, width]; cos, sin [T, 1, dims] (dims 0: no rotation) -> q [T, Hq, d], k, v [T, Hkv, d].

        add: what the rows' adapters add to a product; None: no row has one.
        """
        layer, spec = self.layers[index], self.spec
        h = x if spec.norm_order == "post" else _normed(layer.attn_norm, x)
        qkv = _adapted(add, "qkv", h, layer.qkv(h)).reshape(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        qk, v = qkv[:, : -spec.kv_heads], qkv[:, -spec.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, : spec.heads], qk[:, spec.heads :]
            if spec.qk_norm_whole:
                q, k = layer.q_norm(q.flatten(1)).view_as(q), layer.k_norm(k.flatten(1)).view_as(k)
            else:
                q, k = layer.q_norm(q), layer.k_norm(k)
            qk = torch.cat([q, k], 1)
        if cos.shape[-1]:
            qk = rotate(qk, cos, sin)
        return qk[:, : spec.heads], qk[:, spec.heads :], v

    def attention_output(self, index: int, x: Tensor, o: Tensor, add: Add | None = None) -> Tensor:
        """x [T, width], o [T, Hq, d] -> the layer's output [T, width]."""
        layer, spec, h = self.layers[index], self.spec, o.flatten(1)
        attended = _normed(layer.attn_out_norm, _adapted(add, "o", h, layer.o(h)))
        y = self._residual(x, attended)
        if spec.norm_order == "post":
            y = _normed(layer.attn_norm, y)
            return _normed(layer.mlp_norm, self._residual(y, self._mlp(layer, y, add)))
        z = _normed(layer.mlp_norm, x if spec.parallel else y)
        return self._residual(y, _normed(layer.mlp_out_norm, self._mlp(layer, z, add)))

    def logits(self, x: Tensor) -> Tensor:
        """x [R, width] -> raw scores [R, vocab_size] in the model's dtype."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.out_proj is not None:
            x = self.out_proj(x)
        return self._cap(self.head(x))

    def _cap(self, scores: Tensor) -> Tensor:
        scale, cap = self.spec.logit_scale, self.spec.logit_soft_cap
        if scale != 1.0:
            scores = scores * scale
        return self._elementwise(lambda s: cap * torch.tanh(s / cap), scores) if cap else scores

    def _residual(self, x: Tensor, added: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return x + added if scale == 1.0 else x + added * scale

    def _mlp(self, layer: Layer, z: Tensor, add: Add | None) -> Tensor:
        """z [T, width] -> [T, width]: down(act(gate z) * up z), or down(act(up z)), or experts."""
        if layer.up is None or layer.down is None:
            return layer.experts(z, self._activate) if layer.experts is not None else torch.zeros_like(z)
        h = _adapted(add, "up", z, layer.up(z))
        if self.spec.mlp == "plain":
            h = self._activate(h)
        else:
            gate, up = h.chunk(2, -1)
            h = self._activate(gate) * up
        return _adapted(add, "down", h, layer.down(h))

    def _activate(self, x: Tensor) -> Tensor:
        return self._elementwise(ACTIVATIONS[self.spec.activation], x)

    def _elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return deterministic.activate(function, x) if self.tiled else function(x)

    def _layer(self, index: int, prefix: str) -> Layer:
        spec = self.spec
        norms = {name: self._norm(f"{prefix}{name}", spec.width) for name in layer_norms(spec)}
        experts, up = spec.has_experts(index), ("gate", "up") if spec.mlp == "gated" else ("up",)
        return Layer(
            attn_norm=norms.get("attn_norm"),
            qkv=self._linear(*(f"{prefix}{name}" for name in "qkv")),
            q_norm=self._qk_norm(f"{prefix}q_norm", spec.heads),
            k_norm=self._qk_norm(f"{prefix}k_norm", spec.kv_heads),
            o=self._linear(f"{prefix}o"),
            attn_out_norm=norms.get("attn_out_norm"),
            mlp_norm=norms.get("attn_norm" if spec.one_norm else "mlp_norm"),
            up=None if experts else self._linear(*(f"{prefix}{name}" for name in up)),
            down=None if experts else self._linear(f"{prefix}down"),
            experts=self._experts(prefix) if experts else None,
            mlp_out_norm=norms.get("mlp_out_norm"),
        )

    def _experts(self, prefix: str) -> Experts:
        """The router keeps its precision in int8, too: a near tie must not choose another expert."""
        spec, router = self.spec, self._tensor(f"{prefix}router.weight")
        correction = self._tensor(f"{prefix}router_correction.bias") if spec.sigmoid_router else None
        shared, shared_gate = self._shared_expert(prefix) if spec.shared_width else (None, None)
        stacks = [self._tensor(f"{prefix}expert_{name}.weight") for name in ("gate", "up", "down")]
        return Experts(
            deterministic.PaddedLinear(router, None) if self.tiled else Linear(router),
            tuple(Expert(*(self._product(aligned(w), None) for w in each)) for each in zip(*stacks, strict=True)),
            spec.active_experts,
            spec.norm_experts,
            self.tiled,
            shared,
            shared_gate,
            correction.to(wide(correction.dtype)) if correction is not None else None,
        )

    def _shared_expert(self, prefix: str) -> tuple[Expert, Product]:
        """With its gate, which keeps its precision as the router does."""
        gate = self._tensor(f"{prefix}shared_router.weight")
        parts = (self._linear(f"{prefix}shared_{name}") for name in ("gate", "up", "down"))
        return Expert(*parts), deterministic.PaddedLinear(gate, None) if self.tiled else Linear(gate)

    def _qk_norm(self, name: str, heads: int) -> Norm | None:
        if not self.spec.qk_norm:
            return None
        width = self.spec.head_dim * (heads if self.spec.qk_norm_whole else 1)
        return Norm("heads" if self.spec.qk_norm_each else "rms", width, self.spec.norm_eps, self._scale(name), None)

    def _norm(self, name: str, width: int) -> Norm:
        spec = self.spec
        scale = self._scale(name) if spec.norm_scale else None
        shift = self._tensor(f"{name}.shift") if spec.norm_shift else None
        return Norm(spec.norm, width, spec.norm_eps, scale, shift)

    def _scale(self, name: str) -> Tensor:
        scale = self._tensor(f"{name}.scale")
        return scale if not self.spec.norm_offset else scale.to(wide(scale.dtype)) + self.spec.norm_offset

    def _linear(self, *names: str) -> Product:
        """One projection, or several of the same input stacked into one."""
        weight = fuse(self._tensors, [f"{name}.weight" for name in names])
        bias = fuse(self._tensors, [f"{name}.bias" for name in names]) if f"{names[0]}.bias" in self._tensors else None
        return self._product(weight, bias)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Product:
        if self.quantized:
            return QuantizedLinear(*quantize(weight), bias)
        return deterministic.PaddedLinear(weight, bias) if self.tiled else Linear(weight, bias)

    def _tensor(self, name: str) -> Tensor:
        tensor = aligned(self._tensors[name])
        if isinstance(self._tensors, MutableMapping):
            self._tensors[name] = tensor
        return tensor
