"""A tokenizer as one value: what a worker serves by digest and a router needs to do its work.

The bytes are canonical: equal bundles have equal bytes, and bytes that are not canonical are
refused, so the digest identifies the content. VERSION is bumped when a field is added, removed
or changes meaning; readers refuse other versions by name.

History: 1, the first; 2, `sampling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any

import msgpack

from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams

VERSION = 2
MAX_BUNDLE_BYTES = 128 * 1024 * 1024  # the largest public tokenizer.json files are about 35 MB
MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_VOCAB = 1 << 24
MAX_NAMED_TOKENS = 1024
MAX_EOS = 256
SAMPLING_NAMES = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})


@dataclass(frozen=True)
class Bundle:
    """Everything needed to turn text into ids and back; immutable."""

    tokenizer_json: str  # canonical JSON in the `tokenizers` library's format, without truncation or padding
    chat_template: str = ""  # Jinja source; empty: the model has none
    bos_id: int | None = None  # begin token, whether or not `encode` adds it
    eos_ids: tuple[int, ...] = ()  # ids that end an answer, ascending; may lie beyond the tokenizer
    add_bos: bool = False  # tokenizer_json's post-processor puts bos_id first
    special_tokens: Mapping[str, str] = field(default_factory=dict, hash=False)  # name in templates -> text
    vocab_size: int = 0  # highest id plus one, added tokens included
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)  # SAMPLING_NAMES -> what requests get

    def with_defaults(self, sampling: SamplingParams, unset: Collection[str]) -> SamplingParams:
        """The sampling, with the model's own defaults for the options in `unset`, where it has some."""
        taken: dict[str, Any] = {name: value for name, value in self.sampling.items() if name in unset}
        if "top_k" in taken:
            taken["top_k"] = int(taken["top_k"])
        return replace(sampling, **taken) if taken else sampling

    def to_bytes(self) -> bytes:
        """Canonical bytes; `from_bytes` gives back an equal bundle."""
        content = {
            "version": VERSION,
            "tokenizer_json": self.tokenizer_json,
            "chat_template": self.chat_template,
            "bos_id": self.bos_id,
            "eos_ids": list(self.eos_ids),
            "add_bos": self.add_bos,
            "special_tokens": [list(item) for item in sorted(self.special_tokens.items())],
            "vocab_size": self.vocab_size,
            "sampling": [[name, float(value)] for name, value in sorted(self.sampling.items())],
        }
        packed: bytes = msgpack.packb(content, use_bin_type=True)
        return packed

    def digest(self) -> bytes:
        """SHA-256 over the canonical bytes, 32 bytes: the tokenizer digest of the worker contract."""
        return hashlib.sha256(self.to_bytes()).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Bundle:
        """Raises InvalidRequest naming the part that is oversized, missing, unknown or of the wrong type."""
        if len(data) > MAX_BUNDLE_BYTES:
            raise _refused("", f"{len(data)} bytes exceed the limit of {MAX_BUNDLE_BYTES}")
        try:
            content = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise _refused("", f"not msgpack: {error}") from error
        if not isinstance(content, dict):
            raise _refused("", f"a {type(content).__name__} instead of a map")
        if (version := content.pop("version", None)) != VERSION:
            raise _refused("version", f"version {version!r} instead of {VERSION}")
        expected = {item.name for item in fields(cls)}
        for name in sorted(expected ^ set(content)):
            raise _refused(name, "missing" if name in expected else "unknown key")
        bundle = cls(
            tokenizer_json=_text(content, "tokenizer_json", MAX_BUNDLE_BYTES),
            chat_template=_text(content, "chat_template", MAX_TEMPLATE_CHARS),
            bos_id=None if content["bos_id"] is None else _number(content["bos_id"], "bos_id", MAX_VOCAB),
            eos_ids=tuple(_number(item, "eos_ids", MAX_VOCAB) for item in _items(content, "eos_ids", MAX_EOS)),
            add_bos=_flag(content, "add_bos"),
            special_tokens=_named(_items(content, "special_tokens", MAX_NAMED_TOKENS)),
            vocab_size=_number(content["vocab_size"], "vocab_size", MAX_VOCAB),
            sampling=_defaults(_items(content, "sampling", len(SAMPLING_NAMES))),
        )
        if bundle.bos_id is not None and bundle.bos_id >= bundle.vocab_size:
            raise _refused("bos_id", f"id {bundle.bos_id} is outside the vocabulary of {bundle.vocab_size}")
        if bundle.to_bytes() != data:
            raise _refused("", "not in canonical form")
        return bundle


def _text(content: Mapping[str, object], name: str, limit: int) -> str:
    value = content[name]
    if not isinstance(value, str) or len(value) > limit:
        raise _refused(name, f"not text of at most {limit} characters")
    return value


def _flag(content: Mapping[str, object], name: str) -> bool:
    value = content[name]
    if not isinstance(value, bool):
        raise _refused(name, f"{value!r} is not true or false")
    return value


def _number(value: object, name: str, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise _refused(name, f"{value!r} is not an integer from 0 to {limit}")
    return value


def _items(content: Mapping[str, object], name: str, limit: int) -> list[object]:
    value = content[name]
    if not isinstance(value, list) or len(value) > limit:
        raise _refused(name, f"not a list of at most {limit} items")
    return value


def _named(items: list[object]) -> dict[str, str]:
    named: dict[str, str] = {}
    for item in items:
        match item:
            case [str(name), str(text)]:
                named[name] = text
            case _:
                raise _refused("special_tokens", f"{item!r} is not a name and a text")
    return named


def _defaults(items: list[object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in items:
        match item:
            case [str(name), float(value)] if name in SAMPLING_NAMES and isfinite(value):
                found[name] = value
            case _:
                raise _refused("sampling", f"{item!r} is not a default of sampling")
    return found


def _refused(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(
        problem,
        reason="BAD_TOKENIZER_BUNDLE",
        field=f"bundle.{name}" if name else "bundle",
        remedy="fetch it again from a worker of the same pdserve version",
    )
