"""Typed access to the tokenizer keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TypeVar

from pdserve.errors import CheckpointError
from pdserve.gguf_pairs import Cursor, read_pairs

T = TypeVar("T")


@dataclass(frozen=True)
class GgufMetadata:
    """Keys and values as the file has them; every reader raises CheckpointError naming the key."""

    values: Mapping[str, object]

    def need(self, key: str, kind: type[T]) -> T:
        if key not in self.values:
            raise damaged(key, "the key is missing")
        value = self.values[key]
        if not isinstance(value, kind):
            raise damaged(key, f"a {type(value).__name__} instead of a {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T], default: T) -> T:
        return self.need(key, kind) if key in self.values else default

    def texts(self, key: str) -> list[str]:
        items: list[object] = self.need(key, list)
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) != len(items):
            raise damaged(key, "not a list of strings")
        return texts

    def numbers(self, key: str, count: int) -> list[int]:
        items: list[object] = self.need(key, list)
        numbers = [item for item in items if isinstance(item, int)]
        if len(numbers) != count or len(items) != count:
            raise damaged(key, f"not a list of {count} numbers")
        return numbers

    def floats(self, key: str, count: int) -> list[float]:
        items: list[object] = self.need(key, list)
        floats = [float(item) for item in items if isinstance(item, (int, float))]
        if len(floats) != count or len(items) != count or not all(map(isfinite, floats)):
            raise damaged(key, f"not a list of {count} numbers")
        return floats

    def token_id(self, name: str, tokens: list[str]) -> int | None:
        """`tokenizer.ggml.NAME_token_id`; None when the file does not give one."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.values:
            return None
        token = self.need(key, int)
        if not 0 <= token < len(tokens):
            raise damaged(key, f"id {token} is outside the vocabulary of {len(tokens)}")
        return token


def read_metadata(path: Path) -> GgufMetadata:
    """The metadata of a file. Raises CheckpointError if it cannot be read or is cut short."""
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            _, values = read_pairs(Cursor(data, path), lists_of_text=True)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise Cursor(b"", path).damaged(str(error)) from error
    return GgufMetadata(values)


def damaged(key: str, problem: str) -> CheckpointError:
    return CheckpointError(problem, reason="BAD_GGUF", field=key, remedy="get the file again, or convert it again")
