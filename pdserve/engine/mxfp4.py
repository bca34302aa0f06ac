"""MXFP4, the form of gpt-oss's published experts: read from a Hugging Face directory.

32 neighbouring inputs of a matrix are a block: sixteen bytes of two numbers each, the lower four bits first, and one
byte of scale, which is a power of two (OCP Microscaling Formats, version 1.0: E2M1 numbers, E8M0 scales). A matrix
`name` of experts is stored as two tensors of bytes, outputs before inputs:

    name_blocks    [experts, outputs, inputs / 32, 16]
    name_scales    [experts, outputs, inputs / 32]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.fields import Fields
from pdserve.engine.stored import StoredTensor
from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_PACKED = 16  # bytes of a block
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
# Byte -> its two numbers, as one of twice the width: index_select is fast for single values.
_PAIRS = torch.stack([_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)], -1).view(torch.int64)[:, 0]
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
_AT_ONCE = 1 << 20  # bytes unpacked at a time: bounds the temporaries to some tens of MiB


@dataclass(frozen=True)
class PackedTensor:
    """Experts' matrices as one StoredTensor [experts, inputs, outputs], as a directory stores plain ones."""

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def dtype(self) -> str:
        return "MXFP4"

    @property
    def shape(self) -> Shape:
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * 2 * _PACKED, outputs

    def raw(self) -> Any:
        """The numbers without their scales."""
        return self.blocks.raw()

    def read(self, dtype: torch.dtype) -> Tensor:
        """Exact in fp32 and bf16, whose exponents reach as far; rounded from fp32 otherwise."""
        blocks = _bytes(self.blocks).view(-1, _PACKED)
        scales = _bytes(self.scales)
        values = torch.empty(blocks.shape[0], 2 * _PACKED, dtype=dtype)
        step = _AT_ONCE // _PACKED
        for start in range(0, blocks.shape[0], step):
            pairs = _PAIRS.index_select(0, blocks[start : start + step].flatten().int())
            powers = _POWERS.index_select(0, scales[start : start + step].int())
            values[start : start + step] = pairs.view(torch.float32).view(-1, 2 * _PACKED).mul_(powers[:, None])
        experts, inputs, outputs = self.shape
        return values.view(experts, outputs, inputs).transpose(1, 2)


def check_quantization(fields: Fields) -> None:
    """Takes quantization_config. Raises CheckpointError for another method, or options that we do not know."""
    key = "quantization_config"
    value = fields.take(key, {"quant_method": METHOD})
    if not isinstance(value, dict) or value.get("quant_method") != METHOD:
        raise fields.unsupported(key, value, f"only quant_method {METHOD} is read")
    options = Fields(value, key)
    # Which modules are packed shows in their tensors; whether the peer unpacks them changes no number.
    for name in ("quant_method", "modules_to_not_convert", "dequantize"):
        options.take(name, None)
    options.finish(lambda name: False)


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored` with each pair of blocks and scales as one tensor. Raises CheckpointError naming the tensor at fault."""
    found = {name.removesuffix(_BLOCKS): tensor for name, tensor in stored.items() if name.endswith(_BLOCKS)}
    parts = {f"{name}{suffix}" for name in found for suffix in (_BLOCKS, _SCALES)}
    rest = {name: tensor for name, tensor in stored.items() if name not in parts}
    return rest | {name: _packed(name, blocks, stored) for name, blocks in found.items()}


def _packed(name: str, blocks: StoredTensor, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    if name in stored:
        raise CheckpointError(
            f"tensor {name} is there packed and unpacked",
            field=name,
            reason="UNKNOWN_TENSOR",
            remedy="keep one of them",
        )
    if f"{name}{_SCALES}" not in stored:
        raise CheckpointError(
            f"tensor {name}{_SCALES} is missing",
            field=f"{name}{_SCALES}",
            reason="MISSING_TENSOR",
            remedy="the checkpoint is incomplete; fetch it again",
        )
    scales = stored[f"{name}{_SCALES}"]
    for suffix, tensor in ((_BLOCKS, blocks), (_SCALES, scales)):
        if tensor.dtype != "U8":
            raise CheckpointError(
                f"tensor {name}{suffix} is stored as {tensor.dtype}",
                field=f"{name}{suffix}",
                reason="UNSUPPORTED_DTYPE",
                remedy="MXFP4 is stored as U8",
            )
    if len(blocks.shape) != 4 or blocks.shape[-1] != _PACKED or scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"tensor {name}{_BLOCKS} is {list(blocks.shape)}, its scales {list(scales.shape)}",
            field=f"{name}{_BLOCKS}",
            reason="TENSOR_SHAPE",
            remedy=f"blocks are [experts, outputs, inputs / 32, {_PACKED}], scales the same without the last",
        )
    return PackedTensor(blocks, scales)


def _bytes(tensor: StoredTensor) -> Tensor:
    return torch.from_numpy(tensor.raw())
