"""The header of a GGUF file: metadata and where each tensor lies.

The layout is the format's own (version 2 and 3, little endian): magic, version, two counts,
key/value pairs, tensor records, then the data at an aligned offset. The gguf library has a
reader too, which takes seconds for a vocabulary and follows a damaged length without end;
here every length is checked against the file before it is used. Types and their block sizes
come from the library.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pdserve.engine.weights import Shape
from pdserve.errors import CheckpointError

_MAGIC, _VERSIONS, _ALIGNMENT, _MAX_DIMS = b"GGUF", (2, 3), 32, 4
_SCALARS = {  # value type -> struct format
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


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
    cursor = _Cursor(_map(path), path)
    if cursor.bytes(4, "the magic") != _MAGIC:
        raise cursor.damaged("it does not begin with the GGUF magic")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise cursor.damaged(f"version {version} is not one of {_VERSIONS} in little endian")
    tensors, pairs = cursor.number("Q", "the counts"), cursor.number("Q", "the counts")
    metadata = _metadata(cursor, pairs)
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


class _Cursor:
    """Reads forward; raises CheckpointError instead of reading past the end."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.at, self.path = data, 0, path

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be read as GGUF: {what}",
            field=self.path.name,
            reason="BAD_FILE",
            remedy="the file is truncated, damaged or no GGUF; fetch it again",
        )

    def bytes(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.at:
            raise self.damaged(f"it ends inside {what}")
        self.at += count
        return bytes(self.data[self.at - count : self.at].data)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}"), what))[0]

    def text(self, what: str) -> str:
        raw = self.bytes(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8") from error


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.damaged(f"{key} is there twice")
        metadata[key] = _value(cursor, _value_type(cursor, key), key)
    return metadata


def _value_type(cursor: _Cursor, key: str) -> gguf.GGUFValueType:
    number = cursor.number("I", key)
    try:
        return gguf.GGUFValueType(number)
    except ValueError as error:
        raise cursor.damaged(f"{key} is of unknown type {number}") from error


def _value(cursor: _Cursor, kind: gguf.GGUFValueType, key: str) -> Any:
    if kind == gguf.GGUFValueType.STRING:
        return cursor.text(key)
    if kind == gguf.GGUFValueType.ARRAY:
        return _array(cursor, key)
    return cursor.number(_SCALARS[kind], key)


def _array(cursor: _Cursor, key: str) -> Any:
    """A list; () for an array of strings, which only the tokenizer needs: its lengths are walked over."""
    kind, count = _value_type(cursor, key), cursor.number("Q", key)
    if kind == gguf.GGUFValueType.STRING:
        for _ in range(count):
            cursor.bytes(cursor.number("Q", key), key)
        return ()
    if kind == gguf.GGUFValueType.ARRAY:
        raise cursor.damaged(f"{key} is an array of arrays")
    width = struct.calcsize(f"<{_SCALARS[kind]}")
    return list(struct.unpack(f"<{count}{_SCALARS[kind]}", cursor.bytes(count * width, key)))


def _records(cursor: _Cursor, count: int, alignment: object) -> dict[str, GgufRecord]:
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


def _place(cursor: _Cursor) -> tuple[str, Shape, gguf.GGMLQuantizationType, int]:
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


def _rows(cursor: _Cursor, name: str, shape: Shape, kind: gguf.GGMLQuantizationType, start: int) -> Any:
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
