"""The decoder itself: everything but attention works row by row on [T, ...] tensors.

T counts the tokens of a step, of all its sequences. One layer of a pre-norm model:

    q, k, v = attention_inputs(layer, x)      norm, projection, q/k norm, rotation
    o       = attention over the cache        (engine.py: k and v are written first)
    x       = attention_output(layer, x, o)   x + o Wo, then x + mlp(norm(x))
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.packing import TensorMap, aligned, fuse
from pdserve.engine.positions import check_scheme, rotate
from pdserve.engine.quantize import quantize
from pdserve.engine.spec import ModelSpec
from pdserve.errors import CheckpointError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Norm:
    """RMS norm x / rms(x), or layer norm (x - mean) / std; scale and shift [width] where learned."""

    kind: str
    width: int
    eps: float
    scale: Tensor | None
    shift: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), self.scale, self.shift, self.eps)
        out = F.rms_norm(x, (self.width,), self.scale, self.eps)
        return out if self.shift is None else out + self.shift


@dataclass(frozen=True)
class Linear:
    """x W^T + b with W [outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class QuantizedLinear:
    """x W^T + b with W = weight * scale: int8 [outputs, inputs] times fp32 [outputs]. The plain arithmetic of int8."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


Product = Linear | QuantizedLinear | deterministic.PaddedLinear


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm
    qkv: Product  # width -> (Hq + 2 Hkv) * d
    q_norm: Norm | None
    k_norm: Norm | None
    o: Product  # Hq * d -> width
    mlp_norm: Norm
    up: Product  # width -> ffn, or gate and up stacked: width -> 2 ffn
    down: Product  # ffn -> width


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
        self.position_table = self._tensor("pos") if spec.positions.kind == "learned" else None
        self.in_proj = self._linear("in_proj") if spec.embed_width else None
        self.layers = [self._layer(f"layers.{index}.") for index in range(spec.layers)]
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
        if self.in_proj is not None:
            x = self.in_proj(x)
        if self.position_table is not None:
            x = x + self.position_table[positions]
        return x

    def attention_inputs(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, width]; cos, sin [T, 1, dims] (dims 0: no rotation) -> q [T, Hq, d], k, v [T, Hkv, d]."""
        layer, spec = self.layers[index], self.spec
        h = layer.attn_norm(x) if spec.norm_order == "pre" else x
        qkv = layer.qkv(h).reshape(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        qk, v = qkv[:, : -spec.kv_heads], qkv[:, -spec.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([layer.q_norm(qk[:, : spec.heads]), layer.k_norm(qk[:, spec.heads :])], 1)
        if cos.shape[-1]:
            qk = rotate(qk, cos, sin)
        return qk[:, : spec.heads], qk[:, spec.heads :], v

    def attention_output(self, index: int, x: Tensor, o: Tensor) -> Tensor:
        """x [T, width], o [T, Hq, d] -> the layer's output [T, width]."""
        layer = self.layers[index]
        y = x + layer.o(o.flatten(1))
        if self.spec.norm_order == "pre":
            return y + self._mlp(layer, layer.mlp_norm(y))
        y = layer.attn_norm(y)
        return layer.mlp_norm(y + self._mlp(layer, y))

    def logits(self, x: Tensor) -> Tensor:
        """x [R, width] -> raw scores [R, vocab_size] in the model's dtype."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.out_proj is not None:
            x = self.out_proj(x)
        return self.head(x)

    def _mlp(self, layer: Layer, z: Tensor) -> Tensor:
        """z [T, width] -> [T, width]: down(act(gate z) * up z), or down(act(up z))."""
        h = layer.up(z)
        if self.spec.mlp == "plain":
            return layer.down(self._activate(h))
        gate, up = h.chunk(2, -1)
        return layer.down(self._activate(gate) * up)

    def _activate(self, x: Tensor) -> Tensor:
        function = ACTIVATIONS[self.spec.activation]
        return deterministic.activate(function, x) if self.tiled else function(x)

    def _layer(self, prefix: str) -> Layer:
        spec, d = self.spec, self.spec.head_dim
        up = ("gate", "up") if spec.mlp == "gated" else ("up",)
        return Layer(
            attn_norm=self._norm(f"{prefix}attn_norm", spec.width),
            qkv=self._linear(*(f"{prefix}{name}" for name in "qkv")),
            q_norm=self._head_norm(f"{prefix}q_norm.scale", d),
            k_norm=self._head_norm(f"{prefix}k_norm.scale", d),
            o=self._linear(f"{prefix}o"),
            mlp_norm=self._norm(f"{prefix}mlp_norm", spec.width),
            up=self._linear(*(f"{prefix}{name}" for name in up)),
            down=self._linear(f"{prefix}down"),
        )

    def _head_norm(self, name: str, width: int) -> Norm | None:
        return Norm("rms", width, self.spec.norm_eps, self._tensor(name), None) if self.spec.qk_norm else None

    def _norm(self, name: str, width: int) -> Norm:
        spec = self.spec
        scale = self._tensor(f"{name}.scale") if spec.norm_scale else None
        shift = self._tensor(f"{name}.shift") if spec.norm_shift else None
        return Norm(spec.norm, width, spec.norm_eps, scale, shift)

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


def check_spec(spec: ModelSpec) -> None:
    """Raises CheckpointError naming the first option that the engine does not know."""
    known = {
        "norm": (spec.norm, ("rms", "layer")),
        "norm_order": (spec.norm_order, ("pre", "post")),
        "mlp": (spec.mlp, ("gated", "plain")),
        "activation": (spec.activation, tuple(ACTIVATIONS)),
    }
    for name, (value, allowed) in known.items():
        if value not in allowed:
            raise _unsupported(name, f"{value!r} is none of {', '.join(allowed)}")
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "context_limit"):
        if getattr(spec, name) < 1:
            raise _unsupported(name, f"{getattr(spec, name)} is not a size")
    if spec.heads % spec.kv_heads:
        raise _unsupported("kv_heads", f"{spec.kv_heads} KV heads do not divide {spec.heads} query heads")
    if spec.sliding_window and len(spec.sliding_window) != spec.layers:
        raise _unsupported("sliding_window", f"{len(spec.sliding_window)} windows for {spec.layers} layers")
    if spec.tied_head and (spec.out_width or spec.width) != (spec.embed_width or spec.width):
        raise _unsupported("tied_head", "a tied head needs the embedding's width")
    if spec.positions.kind == "learned" and spec.positions.dims < spec.context_limit:
        raise _unsupported("context_limit", f"{spec.context_limit} exceeds a table of {spec.positions.dims} positions")
    check_scheme(spec.positions, spec.head_dim)


def _unsupported(field: str, message: str) -> CheckpointError:
    return CheckpointError(message, reason="UNSUPPORTED_MODEL", field=field)
