"""The beginning of a GGUF file: two counts and the metadata. Standard library only: loader and tokenizer read it.

The layout is the format's own (version 2 and 3, little endian): magic, version, the number of tensors, the number of
key/value pairs, the pairs. The gguf library has a reader too, which takes seconds for a vocabulary and follows a
damaged length without end; here every length is checked against the file before it is used.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from pdserve.errors import CheckpointError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9  # value types; the others are scalars
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Cursor:
    """Reads a mapped file forward; raises CheckpointError instead of reading past the end."""

    def __init__(self, data: Any, path: Path) -> None:
        """`data`: the file's bytes, as anything whose slices `bytes()` takes."""
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
        return bytes(self.data[self.at - count : self.at])

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}"), what))[0]

    def text(self, what: str) -> str:
        raw = self.bytes(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8") from error


def read_pairs(cursor: Cursor, *, lists_of_text: bool) -> tuple[int, dict[str, Any]]:
    """(number of tensors, metadata); the cursor ends behind the pairs.

    A list of texts, which only the tokenizer needs, is () unless `lists_of_text`: its lengths are walked over.
    """
    if cursor.bytes(4, "the magic") != _MAGIC:
        raise cursor.damaged("it does not begin with the GGUF magic")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise cursor.damaged(f"version {version} is not one of {_VERSIONS} in little endian")
    tensors, pairs = cursor.number("Q", "the counts"), cursor.number("Q", "the counts")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.damaged(f"{key} is there twice")
        metadata[key] = _value(cursor, cursor.number("I", key), key, lists_of_text)
    return tensors, metadata


def _value(cursor: Cursor, kind: int, key: str, lists_of_text: bool) -> Any:
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return _list(cursor, key, lists_of_text)
    if kind not in _SCALARS:
        raise cursor.damaged(f"{key} is of unknown type {kind}")
    return cursor.number(_SCALARS[kind], key)


def _list(cursor: Cursor, key: str, lists_of_text: bool) -> Any:
    kind, count = cursor.number("I", key), cursor.number("Q", key)
    if kind == _STRING and lists_of_text:
        return [cursor.text(key) for _ in range(count)]
    if kind == _STRING:
        for _ in range(count):
            cursor.bytes(cursor.number("Q", key), key)
        return ()
    if kind == _ARRAY:
        raise cursor.damaged(f"{key} is an array of arrays")
    if kind not in _SCALARS:
        raise cursor.damaged(f"{key} is of unknown type {kind}")
    width = struct.calcsize(f"<{_SCALARS[kind]}")
    return list(struct.unpack(f"<{count}{_SCALARS[kind]}", cursor.bytes(count * width, key)))
