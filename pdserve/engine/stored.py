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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    name: str  # stored tensor; with {expert} or {head}: `stack` of them
    transposed: bool = False  # stored as [inputs, outputs]
    # The stored rows are `groups` runs of `of` rows each, of which rows [start, start + rows) are ours; of 0: all are.
    groups: int = 1
    start: int = 0
    rows: int = 0
    of: int = 0
    paired_heads: int = 0  # rows of this many heads hold rotary neighbours (2i, 2i+1); 0: halves already
    stack: int = 0  # tensors that are stacked along a new first axis; 0: one, as it is
    add: float = 0.0  # to every value
    flat: bool = False  # a matrix of one row that is stored as a vector
    squeezed: bool = False  # a matrix stored with an axis of one entry between its two, if the file has it
    stacked: bool = False  # stored as a stack of such tensors, along a first axis that is ours as well

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors."""
        return tuple(self.name.format(expert=i, head=i) for i in range(self.stack)) if self.stack else (self.name,)


@dataclass(frozen=True)
class Naming:
    """How a format names the canonical modules of weights.py."""

    layer: str  # prefix of a layer's tensors, with {layer}
    modules: Mapping[str, str]  # canonical module -> stored module; {expert} or {head} where each has its own
    transposed: frozenset[str] = frozenset()  # canonical modules stored as [inputs, outputs]
    fused: tuple[tuple[str, ...], ...] = ()  # canonical modules that lie one after the other in one stored module
    interleaved: tuple[tuple[str, ...], ...] = ()  # canonical modules whose rows take turns in one stored module
    per_head: bool = False  # what is fused alternates KV head by KV head, each after its query heads
    skipped: Mapping[str, int] = field(default_factory=dict)  # canonical module -> leading rows that nothing reads
    paired: frozenset[str] = frozenset()  # canonical modules whose rotary pairs are neighbours
    add_to_scales: float = 0.0  # what the stored scales of norms lack
    one_norm: Mapping[str, str] = field(default_factory=dict)  # modules with another name in a layer of one norm
    complete: frozenset[str] = frozenset()  # canonical modules whose stored names are whole; that of a bias + _bias
    stacked: frozenset[str] = frozenset()  # canonical modules whose experts lie in one stored tensor, each as said
    squeezed: frozenset[str] = frozenset()  # canonical matrices that may be stored as [outputs, 1, inputs]
    flat: frozenset[str] = frozenset()  # canonical modules of one row that are stored as vectors
    harmless: tuple[str, ...] = ()  # patterns of stored buffers that carry no weights
    unread: tuple[str, ...] = ()  # modules that a file may have, too, in layers that read another's K and V

    def sources(self, spec: ModelSpec, strip: str = "") -> dict[str, Source]:
        """Canonical name -> source; `strip` is a prefix that this file's names lack."""
        shapes = expected_tensors(spec)
        return {name: self._source(name, spec, shapes, strip) for name in shapes}

    def ignored(self, spec: ModelSpec) -> tuple[str, ...]:
        """Patterns of stored tensors that this model does not read."""
        layers = [layer for layer in range(spec.layers) if spec.kv_layer(layer) != layer]
        modules = [f"{self.layer.format(layer=layer)}{self.modules[name]}" for layer in layers for name in self.unread]
        return (*self.harmless, *(rf"{re.escape(module)}\.(weight|bias)" for module in modules))

    def _source(self, name: str, spec: ModelSpec, shapes: Mapping[str, Shape], strip: str) -> Source:
        parts = name.split(".")
        layer = self.layer.format(layer=parts[1]) if parts[0] == "layers" else ""
        module = parts[2] if layer else parts[0]
        modules = {**self.modules, **self.one_norm} if spec.one_norm else self.modules
        if module not in modules:
            raise CheckpointError(
                f"this format has no place for tensor {name}",
                field=name,
                remedy="store the model in another format, such as the one it came in",
            )
        suffix = "bias" if parts[-1] in ("bias", "shift") else "weight"
        ending = {"weight": "", "bias": "_bias"}[suffix] if module in self.complete else f".{suffix}"
        stored = f"{layer}{modules[module]}{ending}".removeprefix(strip)
        shape = spec.shape_of(int(parts[1]) if layer else 0)
        heads = shape.heads if module in ("q", "q_norm") else shape.kv_heads
        return Source(
            stored,
            transposed=module in self.transposed and suffix == "weight",
            **self._rows(name, module, spec, shapes),
            paired_heads=heads if module in self.paired else 0,
            stack=spec.experts if "{expert}" in stored else heads if "{head}" in stored else 0,
            add=self.add_to_scales if parts[-1] == "scale" else 0.0,
            flat=module in self.flat,
            squeezed=module in self.squeezed and suffix == "weight",
            stacked=module in self.stacked,
        )

    def _rows(self, name: str, module: str, spec: ModelSpec, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Which rows of the stored tensor are those of `name`: Source's groups, start, rows and of."""
        if module in self.skipped:
            start, rows = self.skipped[module], shapes[name][0]
            return {"start": start, "rows": rows, "of": start + rows}
        axis = int(module in self.stacked)
        for together in self.interleaved:
            if module in together:
                at, rows = together.index(module), shapes[name][axis]
                return {"groups": rows, "start": at, "rows": 1, "of": len(together)}
        for together in self.fused:
            if module in together:
                at = together.index(module)
                groups = spec.shape_of(int(name.split(".")[1])).kv_heads if self.per_head else 1
                sizes = [shapes[name.replace(f".{module}.", f".{other}.")][axis] // groups for other in together]
                return {"groups": groups, "start": sum(sizes[:at]), "rows": sizes[at], "of": sum(sizes)}
        return {}


_SAID = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "float64"}
_STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "float64"}


def own_dtype(stored: Mapping[str, StoredTensor], said: object = None) -> str:
    """A checkpoint's own precision: what its configuration says, else what most of its matrices have.

    fp32 for quantised matrices: nothing is lost. Raises CheckpointError for a precision that we do not compute in.
    """
    if said is not None:
        name = str(said).removeprefix("torch.")
        if name not in _SAID:
            raise CheckpointError(
                f"the configuration says dtype {said}",
                field="dtype",
                reason="UNSUPPORTED_DTYPE",
                remedy=f"give one of {', '.join(_SAID.values())} instead of auto",
            )
        return _SAID[name]
    kinds = Counter(tensor.dtype for tensor in stored.values() if len(tensor.shape) > 1)
    return _STORED.get(kinds.most_common(1)[0][0], "fp32") if kinds else "fp32"


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
        _check_shapes(name, shape, source, stored)  # before anything of that size is made
        own = torch.empty(shape, dtype=target, device=device)
        for place, part in enumerate(source.names):
            values = stored[part].read(torch.float32 if source.add else target)  # one rounding only
            _fill(own[place] if source.stack else own, arrange(values, source), source.add, part)
        tensors[name] = own
    check_tensors(spec, tensors)
    return tensors


def _account(sources: Mapping[str, Source], stored: Mapping[str, StoredTensor], harmless: Sequence[str]) -> None:
    used = {name for source in sources.values() for name in source.names}
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


def _check_shapes(name: str, shape: Shape, source: Source, stored: Mapping[str, StoredTensor]) -> None:
    for part in source.names:
        found = stored[part].shape
        if _canonical_shape(found, source) != (shape[1:] if source.stack else shape):
            raise CheckpointError(
                f"tensor {part} is {list(found)}, which does not make {name} {list(shape)}",
                field=part,
                reason="TENSOR_SHAPE",
                remedy="the configuration and the weights are not of one model",
            )


def _canonical_shape(shape: Shape, source: Source) -> Shape:
    """() if it is not of as many rows as the source says."""
    if source.stacked:
        return (*shape[:1], *_canonical_shape(shape[1:], replace(source, stacked=False)))
    if source.transposed:
        shape = shape[::-1]
    if source.flat:
        shape = (1, *shape)
    if source.squeezed and len(shape) == 3 and shape[1] == 1:
        shape = shape[::2]
    if not source.of:
        return shape
    return (source.groups * source.rows, *shape[1:]) if shape[:1] == (source.groups * source.of,) else ()


def arrange(tensor: Tensor, source: Source) -> Tensor:
    """A stored matrix, or anything with its rows, as the canonical one; only `transposed` touches columns."""
    axis = int(source.stacked)  # of the rows
    if source.transposed:
        tensor = tensor.transpose(axis, axis + 1)
    if source.flat:
        tensor = tensor[None]
    if source.squeezed and tensor.dim() == 3:
        tensor = tensor[:, 0]
    if source.of:
        # [groups, of, ...] -> [groups * rows, ...]
        grouped = tensor.reshape(*tensor.shape[:axis], source.groups, source.of, *tensor.shape[axis + 1 :])
        tensor = grouped.narrow(axis + 1, source.start, source.rows).flatten(axis, axis + 1)
    if source.paired_heads:
        # [heads, pairs, 2, ...] -> [heads, 2, pairs, ...]: row 2i of a head moves to i, row 2i+1 to i + dims/2
        pairs = tensor.shape[0] // source.paired_heads // 2
        grouped = tensor.reshape(source.paired_heads, pairs, 2, *tensor.shape[1:])
        tensor = grouped.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _fill(own: Tensor, values: Tensor, add: float, name: str) -> None:
    own.copy_(values + add if add else values)
    if own.dtype == torch.float16 and not bool(torch.isfinite(own).all()):
        raise CheckpointError(
            f"tensor {name} has values outside fp16",
            field=name,
            reason="OUT_OF_RANGE",
            remedy="load it as bf16 or fp32",
        )
