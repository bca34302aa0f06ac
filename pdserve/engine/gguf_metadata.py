"""The metadata of a GGUF file, read by its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.engine.fields import Fields
from pdserve.engine.stored import StoredTensor
from pdserve.errors import CheckpointError


class Metadata(Fields):
    """Fields whose keys are given without the architecture's prefix: `key` completes them."""

    def __init__(self, values: Mapping[str, Any], where: str, arch: str) -> None:
        super().__init__(values, where)
        self.arch = arch

    def key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def size(self, name: str, *default: Any, minimum: int = 1, maximum: int = 2**62) -> int:
        return self.integer(self.key(name), *default, minimum=minimum, maximum=maximum)

    def sizes(self, name: str, layers: int, minimum: int = 1) -> tuple[int, ...]:
        """One size for each layer: the file has a list of them, or a size that they share."""
        key = self.key(name)
        found = self.take(key)
        if not isinstance(found, list):
            return (self.size(name, minimum=minimum),) * layers
        if len(found) != layers or not all(type(size) is int and size >= minimum for size in found):
            raise self.unsupported(key, found, f"expected a size from {minimum} for each of {layers} layers")
        return tuple(found)


def vocab_size(fields: Metadata, stored: Mapping[str, StoredTensor]) -> int:
    """The rows of the embedding; metadata may say it too and must agree."""
    if "token_embd.weight" not in stored:
        raise CheckpointError(
            "tensor token_embd.weight is missing",
            field="token_embd.weight",
            reason="MISSING_TENSOR",
            remedy="the checkpoint is incomplete; fetch it again",
        )
    rows = stored["token_embd.weight"].shape[0]
    fields.expect(fields.key("vocab_size"), (rows,))
    return rows


def head_dim(fields: Metadata, width: int, heads: int) -> int:
    key = fields.key("attention.key_length")
    if key not in fields and width % heads:
        raise fields.unsupported(fields.key("attention.head_count"), heads, f"it does not divide the width {width}")
    found = fields.integer(key, width // heads)
    fields.expect(fields.key("attention.value_length"), (found,))
    return found
