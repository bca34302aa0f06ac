"""The canonical encoding under every digest. Standard library only.

docs/protocol.md has it as a table. Another encoding is another contract version.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass


def sha256(domain: str, value: object) -> bytes:
    return hashlib.sha256(encode((domain, value))).digest()


def encode(value: object) -> bytes:
    """One tagged, length-prefixed encoding without collisions.

    Every value is a one-byte type tag, an 8-byte little-endian length, and the body;
    containers concatenate their encoded items. So absent (N), empty (a length of 0) and
    neighbours ("ab","c" against "a","bc") can never meet.
    """
    if value is None:
        return _tagged(b"N", b"")
    if isinstance(value, bool):
        return _tagged(b"B", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"I", str(value).encode())
    if isinstance(value, float):
        return _tagged(b"F", struct.pack("<d", value))
    if isinstance(value, str):
        return _tagged(b"S", value.encode())
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _tagged(b"Y", bytes(value))
    if isinstance(value, (tuple, list)):
        return _tagged(b"T", b"".join(encode(item) for item in value))
    if isinstance(value, Mapping):
        return _tagged(b"M", b"".join(encode(k) + encode(value[k]) for k in sorted(value)))
    if is_dataclass(value):
        pairs = tuple((f.name, getattr(value, f.name)) for f in fields(value))
        return _tagged(b"D", encode(type(value).__name__) + encode(pairs))
    raise TypeError(f"no canonical encoding for {type(value).__name__}")


def _tagged(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body
