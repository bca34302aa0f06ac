"""The header of a GGUF file: metadata and where each tensor lies.

After the metadata (`pdserve/gguf_pairs.py`) come the tensor records, then the data at an aligned offset. Every length
is checked against the file before it is used. Types and their block sizes come from the gguf library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError
from pdserve.gguf_pairs import Cursor, read_pairs

_ALIGNMENT, _MAX_DIMS = 32, 4


@dataclass(frozen=True)
class GgufRecord:
    """A tensor as stored: `data` is uint8 [rows, bytes per row], a view of the mapped file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: Shape  # outermost first
    data: Any


@dataclass(frozen=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufRecord]


def read_header(path: Path) -> GgufHeader:
    """Maps `path`. Raises CheckpointError naming what is damaged or where the file ends too early."""
    cursor = Cursor(_map(path), path)
    tensors, metadata = read_pairs(cursor, lists_of_text=False)
    return GgufHeader(metadata, _records(cursor, tensors, metadata.get("general.alignment", _ALIGNMENT)))


def _map(path: Path) -> Any:
    try:
        if not path.stat().st_size:
            return np.empty(0, np.uint8)  # an empty file cannot be mapped
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", field=path.name, reason="BAD_FILE", remedy="check the file's permissions"
        ) from error


def _records(cursor: Cursor, count: int, alignment: object) -> dict[str, GgufRecord]:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment {alignment} is no power of two")
    places = [_place(cursor) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    records: dict[str, GgufRecord] = {}
    for name, shape, kind, offset in places:
        if name in records:
            raise cursor.damaged(f"tensor {name} is there twice")
        records[name] = GgufRecord(name, kind, shape, _rows(cursor, name, shape, kind, base + offset))
    return records


def _place(cursor: Cursor) -> tuple[str, Shape, gguf.GGMLQuantizationType, int]:
    name = cursor.text("a tensor name")
    dims = cursor.number("I", f"tensor {name}")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.damaged(f"tensor {name} has {dims} dimensions")
    innermost_first = [cursor.number("Q", f"tensor {name}") for _ in range(dims)]
    number, offset = cursor.number("I", f"tensor {name}"), cursor.number("Q", f"tensor {name}")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.damaged(f"tensor {name} is of unknown type {number}") from error
    return name, tuple(reversed(innermost_first)), kind, offset


def _rows(cursor: Cursor, name: str, shape: Shape, kind: gguf.GGMLQuantizationType, start: int) -> Any:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = 1
    for count in shape[:-1]:
        rows *= count
    if not rows or not shape[-1] or shape[-1] % block:
        raise cursor.damaged(f"tensor {name} {list(shape)} does not consist of {kind.name} blocks of {block}")
    row_bytes = shape[-1] // block * size
    end = start + rows * row_bytes
    if end > len(cursor.data):
        missing = end - len(cursor.data)
        raise cursor.damaged(f"it ends {missing} bytes before the end of tensor {name}")
    return cursor.data[start:end].reshape(rows, row_bytes)
