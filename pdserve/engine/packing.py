"""Weights in memory: aligned, and stacked where one product can do the work of several."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

TensorMap = Mapping[str, Tensor]

_ALIGNMENT = 64  # bytes; matrix kernels may sum in another order for another alignment


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if contiguous and aligned, else a copy that is."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def fuse(tensors: TensorMap, names: Sequence[str]) -> Tensor:
    """Stacks tensors along their first axis; a mutable mapping's entries become views of the stack.

    Tensors that already lie one after the other in one storage (because another engine of
    the same model fused them) are used as they are.
    """
    parts = [tensors[name] for name in names]
    whole = _adjacent(parts)
    if whole is None:
        whole = aligned(torch.cat(parts) if len(parts) > 1 else parts[0])
    if isinstance(tensors, MutableMapping):
        start = 0
        for name, part in zip(names, parts, strict=True):
            tensors[name] = whole[start : start + part.shape[0]]
            start += part.shape[0]
    return whole


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    first = parts[0]
    expected = first.data_ptr()
    if expected % _ALIGNMENT:
        return None
    for part in parts:
        one_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (one_storage and part.is_contiguous() and part.data_ptr() == expected):
            return None
        expected += part.numel() * part.element_size()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
