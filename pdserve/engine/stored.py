"""From tensors as a file stores them to the canonical tensors of a ModelSpec.

A `StoredTensor` is a view into a mapped file. A `Source` says which stored tensor a
canonical one comes from and how it is laid out there. `assemble` follows the sources and
accounts for every stored tensor: nothing missing, nothing left over.

Every canonical tensor gets storage of its own: the file may be replaced afterwards, and
the alignment (on which the order of a vector kernel's sums can depend) is the allocator's,
not the file's. One tensor is converted at a time, so the peak is the weights plus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import Shape, check_tensors, expected_tensors
from pdserve.errors import CheckpointError


class StoredTensor(Protocol):
    """One tensor of a mapped checkpoint file."""

    @property
    def dtype(self) -> str:
        """The stored type's name, such as BF16 or Q4_1."""

    @property
    def shape(self) -> Shape:
        """Logical shape, outermost first."""

    def raw(self) -> Any:
        """The stored bytes as a contiguous buffer, without a copy."""

    def read(self, dtype: torch.dtype) -> Tensor:
        """The values, converted to `dtype`; may share memory with the mapped file."""


@dataclass(frozen=True)
class Source:
    """Where one canonical tensor comes from."""

    name: str  # stored tensor
    transposed: bool = False  # stored as [inputs, outputs]
    part: int = 0  # which of `parts` equal parts of the outputs
    parts: int = 1
    paired_heads: int = 0  # rows of this many heads hold rotary neighbours (2i, 2i+1); 0: halves already


@dataclass(frozen=True)
class Naming:
    """How a format names the canonical modules of weights.py."""

    layer: str  # prefix of a layer's tensors, with {layer}
    modules: Mapping[str, str]  # canonical module -> stored module
    transposed: frozenset[str] = frozenset()  # canonical modules stored as [inputs, outputs]
    fused: Mapping[str, int] = field(default_factory=dict)  # canonical module -> its part of a fused q, k, v
    paired: frozenset[str] = frozenset()  # canonical modules whose rotary pairs are neighbours
    harmless: tuple[str, ...] = ()  # patterns of stored buffers that carry no weights

    def sources(self, spec: ModelSpec, strip: str = "") -> dict[str, Source]:
        """Canonical name -> source; `strip` is a prefix that this file's names lack."""
        return {name: self._source(name, spec, strip) for name in expected_tensors(spec)}

    def _source(self, name: str, spec: ModelSpec, strip: str) -> Source:
        parts = name.split(".")
        layer = self.layer.format(layer=parts[1]) if parts[0] == "layers" else ""
        module = parts[2] if layer else parts[0]
        if module not in self.modules:
            raise CheckpointError(f"this format has no place for tensor {name}", field=name)
        suffix = "bias" if parts[-1] in ("bias", "shift") else "weight"
        return Source(
            f"{layer}{self.modules[module]}.{suffix}".removeprefix(strip),
            transposed=module in self.transposed and suffix == "weight",
            part=self.fused.get(module, 0),
            parts=3 if module in self.fused else 1,
            paired_heads=(spec.heads if module == "q" else spec.kv_heads) if module in self.paired else 0,
        )


def assemble(
    spec: ModelSpec,
    sources: Mapping[str, Source],
    stored: Mapping[str, StoredTensor],
    dtype: str,
    device: str = "cpu",
    harmless: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The canonical tensors of `spec` in `dtype` on `device`.

    Raises CheckpointError naming the stored tensor that is missing, misshapen, unknown, or
    whose values do not fit `dtype`.
    """
    _account(sources, stored, harmless)
    target = torch_dtype(dtype)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(spec).items():
        source = sources[name]
        tensor = stored[source.name]
        if _canonical_shape(tensor.shape, source) != shape:
            raise CheckpointError(
                f"tensor {source.name} is {list(tensor.shape)}, which does not make {name} {list(shape)}",
                field=source.name,
                reason="TENSOR_SHAPE",
                remedy="the configuration and the weights are not of one model",
            )
        tensors[name] = _own(_arrange(tensor.read(target), source), target, device, source.name)
    check_tensors(spec, tensors)
    return tensors


def _account(sources: Mapping[str, Source], stored: Mapping[str, StoredTensor], harmless: Sequence[str]) -> None:
    used = {source.name for source in sources.values()}
    for name in sorted(used):
        if name not in stored:
            raise CheckpointError(
                f"tensor {name} is missing",
                field=name,
                reason="MISSING_TENSOR",
                remedy="the checkpoint is incomplete; fetch it again",
            )
    for name in sorted(set(stored) - used):
        if not any(re.fullmatch(pattern, name) for pattern in harmless):
            raise CheckpointError(
                f"tensor {name} {list(stored[name].shape)} belongs to no part of this model",
                field=name,
                reason="UNKNOWN_TENSOR",
                remedy="the model has a feature that this loader does not know",
            )


def _canonical_shape(shape: Shape, source: Source) -> Shape:
    if source.transposed:
        shape = shape[::-1]
    if not shape or shape[0] % source.parts:
        return ()
    return (shape[0] // source.parts, *shape[1:])


def _arrange(tensor: Tensor, source: Source) -> Tensor:
    if source.transposed:
        tensor = tensor.T
    if source.parts > 1:
        tensor = tensor.chunk(source.parts)[source.part]
    if source.paired_heads:
        # [heads, pairs, 2, ...] -> [heads, 2, pairs, ...]: row 2i of a head moves to i, row 2i+1 to i + dims/2
        pairs = tensor.shape[0] // source.paired_heads // 2
        grouped = tensor.reshape(source.paired_heads, pairs, 2, *tensor.shape[1:])
        tensor = grouped.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _own(values: Tensor, dtype: torch.dtype, device: str, name: str) -> Tensor:
    own = torch.empty(values.shape, dtype=dtype, device=device)
    own.copy_(values)
    if dtype == torch.float16 and not bool(torch.isfinite(own).all()):
        raise CheckpointError(
            f"tensor {name} has values outside fp16",
            field=name,
            reason="OUT_OF_RANGE",
            remedy="load it as bf16 or fp32",
        )
    return own
