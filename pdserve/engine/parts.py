"""What a layer is made of: norms, linear maps and activation functions, all row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pdserve.engine import deterministic

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Norm:
    """RMS norm x / rms(x), or layer norm (x - mean) / std; scale and shift [width] where learned.

    A scale that is wider than x (an offset was added to it) is applied before rounding to x's dtype.
    """

    kind: str
    width: int
    eps: float
    scale: Tensor | None
    shift: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), self.scale, self.shift, self.eps)
        if self.scale is not None and self.scale.dtype != x.dtype:
            return F.rms_norm(x.to(self.scale.dtype), (self.width,), self.scale, self.eps).to(x.dtype)
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
