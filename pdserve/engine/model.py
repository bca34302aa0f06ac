"""The decoder itself: everything but attention works row by row on [T, ...] tensors.

T counts the tokens of a step, of all its sequences. One layer of a pre-norm model:

    q, k, v = attention_inputs(layer, x)      norm, projection, q/k norm, rotation
    o       = attention over the cache        (engine.py: k and v are written first)
    x       = attention_output(layer, x, o)   x + o Wo, then x + mlp(norm(x))

Other placements of the norms (spec.py draws them) differ in which norms a layer has and what they are applied to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.adapters import Add
from pdserve.engine.building import Builder, Layer
from pdserve.engine.packing import TensorMap
from pdserve.engine.parts import ACTIVATIONS, Norm, Rows
from pdserve.engine.positions import rotate
from pdserve.engine.runnable import check_spec
from pdserve.engine.spec import ModelSpec


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _adapted(add: Add | None, product: str, x: Tensor, y: Tensor) -> Tensor:
    """A product's output y of x, with what adapters add to it."""
    return y if add is None else add(product, x, y)


class Decoder:
    """A ModelSpec with its weights. Holds no state besides them.

    `tensors` are the canonical ones; building.py says what becomes of their storage.
    """

    def __init__(self, spec: ModelSpec, tensors: TensorMap, *, tiled: bool = False, quantized: bool = False) -> None:
        check_spec(spec)
        self.spec = spec
        self.tiled, self.quantized = tiled, quantized
        self.trainable = any(tensor.requires_grad for tensor in tensors.values())
        build = Builder(spec, tensors, tiled, quantized)
        table = build.tensor("embed")
        self.embedding: Rows = table
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.embedding.dtype)  # rounded, as the peer does
        self.embed_norm = build.norm("embed_norm", spec.width) if spec.embed_norm else None
        self.position_table = build.tensor("pos") if spec.positions.kind == "learned" else None
        self.in_proj = build.linear("in_proj") if spec.embed_width else None
        self.inputs = build.layer_inputs() if spec.layer_input_width else None
        self.layers = [build.layer(index) for index in range(spec.layers)]
        self.final_norm = build.norm("final_norm", spec.width) if spec.final_norm else None
        self.out_proj = build.linear("out_proj") if spec.out_width else None
        self.head = build.product(
            table if spec.tied_head else build.tensor("head.weight"),
            build.tensor("head.bias") if spec.head_bias else None,
        )

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

    def layer_inputs(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """ids, positions [T] -> what each layer adds for itself, [T, layers, width of it]; nothing for most models."""
        return () if self.inputs is None else (self.inputs(ids, self.embed(ids, positions)),)

    def attention_inputs(
        self, index: int, x: Tensor, cos: Tensor, sin: Tensor, add: Add | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, width]; cos, sin [T, 1, dims] (dims 0: no rotation) -> q [T, Hq, d], k, v [T, Hkv, d].

        A layer that reads another's K and V, or none, has 0 KV heads here; without attention q is the normed x, which
        the output projection takes. Of a convolution q is the gate of what it gives, k its input, and v of 0 heads.
        add: what the rows' adapters add to a product; None: no row has one.
        """
        layer, spec = self.layers[index], self.spec
        shape, own = layer.shape, layer.shape.kv_heads if spec.has_kv(index) else 0
        heads, head_dim = shape.heads, shape.head_dim
        h = x if spec.norm_order == "post" else _normed(layer.attn_norm, x)
        if layer.qkv is None:
            none = x.new_empty(x.shape[0], 0, head_dim)
            return h.view(x.shape[0], heads, head_dim) if heads else none, none, none
        product = "qkv" if layer.conv is None else "conv_in"
        qkv = _adapted(add, product, h, layer.qkv(h)).reshape(x.shape[0], -1, head_dim)
        if layer.conv is not None:
            return qkv[:, 1:2], qkv[:, :1] * qkv[:, 2:], x.new_empty(x.shape[0], 0, head_dim)
        qk, v = qkv[:, : heads + own], qkv[:, qkv.shape[1] - own :]  # V may be K
        if layer.q_norm is not None:
            q, k = qk[:, :heads], qk[:, heads:]
            if spec.qk_norm_whole:
                q, k = (_normed(norm, t.flatten(1)).view_as(t) for norm, t in ((layer.q_norm, q), (layer.k_norm, k)))
            else:
                q, k = layer.q_norm(q), _normed(layer.k_norm, k)
            qk = torch.cat([q, k], 1)
        if cos.shape[-1]:
            qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], _normed(layer.v_norm, v)

    def attention_output(
        self, index: int, x: Tensor, o: Tensor, add: Add | None = None, own: Tensor | None = None
    ) -> Tensor:
        """x [T, width], o [T, Hq, d] -> the layer's output [T, width].

        own: this layer's part of `layer_inputs`, [T, width of it], where the model has any.
        """
        layer, spec, y = self.layers[index], self.spec, x
        if layer.o is not None:
            h = o.flatten(1)
            product = "o" if layer.conv is None else "conv_out"
            y = self._residual(x, _normed(layer.attn_out_norm, _adapted(add, product, h, layer.o(h))))
        if layer.up is None and layer.experts is None:
            return self._finished(layer, y, own)
        if spec.norm_order == "post":
            y = _normed(layer.attn_norm, y)
            return self._finished(layer, _normed(layer.mlp_norm, self._residual(y, self._mlp(layer, y, add))), own)
        added = self._mlp(layer, _normed(layer.mlp_norm, x if spec.parallel else y), add)
        if layer.beside is not None:
            added = layer.beside(y, added, self._gated)
        return self._finished(layer, self._residual(y, _normed(layer.mlp_out_norm, added)), own)

    def _finished(self, layer: Layer, y: Tensor, own: Tensor | None) -> Tensor:
        if layer.own_input is not None and own is not None:
            y = y + layer.own_input(y, own, self._activate)
        return y if layer.scale is None else y * layer.scale

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
            return layer.experts(z, self._gated) if layer.experts is not None else torch.zeros_like(z)
        h = _adapted(add, "up", z, layer.up(z))
        h = self._activate(h) if self.spec.mlp == "plain" else self._gated(*h.chunk(2, -1))
        return _adapted(add, "down", h, layer.down(h))

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        alpha, limit = self.spec.swiglu_alpha, self.spec.swiglu_limit
        if not alpha:
            return self._activate(gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * self._elementwise(torch.sigmoid, gate * alpha))

    def _activate(self, x: Tensor) -> Tensor:
        return self._elementwise(ACTIVATIONS[self.spec.activation], x)

    def _elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return deterministic.activate(function, x) if self.tiled else function(x)
