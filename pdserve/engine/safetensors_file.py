"""Mapped safetensors files as StoredTensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class MappedTensor:
    """A tensor whose storage is the mapped file."""

    name: str
    dtype: str  # safetensors' name
    values: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.values.shape)

    def raw(self) -> Any:
        return self.values.reshape(-1).view(torch.uint8).numpy()

    def read(self, dtype: torch.dtype) -> Tensor:
        if self.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {self.name} is stored as {self.dtype}",
                field=self.name,
                reason="UNSUPPORTED_DTYPE",
                remedy="use a checkpoint in F32, BF16 or F16",
            )
        return self.values


@dataclass(frozen=True)
class SafetensorsFile:
    tensors: Mapping[str, MappedTensor]
    metadata: Mapping[str, str]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Maps a file; raises CheckpointError if it is truncated or no safetensors file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            tensors = {
                name: MappedTensor(name, file.get_slice(name).get_dtype(), file.get_tensor(name)) for name in names
            }
            return SafetensorsFile(tensors, dict(file.metadata() or {}))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}",
            field=path.name,
            reason="BAD_FILE",
            remedy="the file is truncated or damaged; fetch it again",
        ) from error
