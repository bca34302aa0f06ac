"""GGUF files: mapped, possibly quantised tensors, and how a whole file is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.digest import model_digest
from pdserve.engine.families import directory_sources
from pdserve.engine.gguf_header import GgufRecord, read_header
from pdserve.engine.gguf_rope import ROPE_TENSORS
from pdserve.engine.gguf_spec import spec_from_metadata
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.stored import StoredTensor, assemble, own_dtype
from pdserve.engine.validate import check_spec
from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError

_BLOCK_VALUES = 1 << 20  # values dequantised at a time: bounds the temporaries to a few MiB


@dataclass(frozen=True)
class GgufTensor:
    """A StoredTensor of a mapped, possibly quantised record."""

    record: GgufRecord

    @property
    def dtype(self) -> str:
        return str(self.record.kind.name)

    @property
    def shape(self) -> Shape:
        return self.record.shape

    def raw(self) -> Any:
        return self.record.data.reshape(-1)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Dequantises to fp32 and casts, some rows at a time."""
        stored, name = self.record.data, self.record.name
        values = torch.empty(self.shape, dtype=dtype)
        rows = values.view(stored.shape[0], -1)
        step = max(1, _BLOCK_VALUES // rows.shape[1])
        try:
            for start in range(0, rows.shape[0], step):
                block = gguf.quants.dequantize(stored[start : start + step], self.record.kind)
                rows[start : start + step].copy_(torch.from_numpy(np.array(block, dtype=np.float32)))
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {name} is quantised as {self.dtype}",
                field=name,
                reason="UNSUPPORTED_DTYPE",
                remedy="use a file quantised to a type that the gguf library can read, such as Q8_0 or Q4_K",
            ) from error
        return values


def load_gguf(path: Path, dtype: str, device: str, files: CheckpointFiles) -> LoadedModel:
    """Raises CheckpointError naming the file, tensor or metadata key at fault."""
    files.stamp(path)
    metadata, stored = read_gguf(path)
    family, spec = spec_from_metadata(metadata, stored, str(path))
    check_spec(spec)
    digest = model_digest(spec, stored, files.digests(path, stored))
    weights = {name: tensor for name, tensor in stored.items() if name not in ROPE_TENSORS}
    dtype = own_dtype(stored) if dtype == "auto" else dtype
    tensors = assemble(spec, family.naming.sources(spec), weights, dtype, device, family.naming.ignored(spec))
    sources = directory_sources(family.model_type, spec)
    return LoadedModel(path.stem, spec, tensors, dtype, digest, path, sources=sources)


def read_gguf(path: Path) -> tuple[Mapping[str, Any], dict[str, StoredTensor]]:
    """Metadata (arrays of strings left out: they belong to the tokenizer) and mapped tensors."""
    header = read_header(path)
    return header.metadata, {name: GgufTensor(record) for name, record in header.tensors.items()}
