"""What a layer is made of: norms, linear maps and activation functions, all row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Norm:
    """RMS norm x / rms(x), or layer norm (x - mean) / std; scale and shift [width] where learned.

    Of kind heads: layer norm of each head of x [T, H, width] by itself, with a scale [H, width]. A scale that is wider
    than x (an offset was added to it) is applied before rounding to x's dtype.
    """

    kind: str  # rms | layer | heads
    width: int
    eps: float
    scale: Tensor | None
    shift: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.scale.dtype != x.dtype:
            shift = None if self.shift is None else self.shift.to(self.scale.dtype)
            return replace(self, shift=shift)(x.to(self.scale.dtype)).to(x.dtype)
        if self.kind == "heads":
            y = F.layer_norm(x, (self.width,), eps=self.eps)
            return y if self.scale is None else y * self.scale
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


class Product(Protocol):
    """x [..., inputs] -> [..., outputs]: in torch, padded (deterministic.py), or by the kernels (native/packed.py)."""

    @property
    def outputs(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Rows(Protocol):
    """An embedding: a tensor [rows, width], or what is looked up like one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, ids: Any, /) -> Tensor: ...
