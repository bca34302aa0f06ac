"""The keyed digests of a handoff: BLAKE3 with the ticket's 32-byte secret as key.

Every digest starts with an eight-byte tag, so that one can never stand in for another:

    proof     "pd-proof" | encode(identity)
    frame     "pd-frame" | u32 len(header) | header | payload
    logits    "pd-logit" | u32 len(dtype) | dtype | u32 position | data
    memory    "pd-share" | u64 size of the memory
    manifest  "pd-manif" | frame digests in order | logits digest | SHA-256 identity digest
                         | u32 frames | u64 payload bytes | u32 start | u32 end

Integers are little endian; `encode` is that of encoding.py. Without TLS the secret
crosses the router in clear, so these prove integrity and binding, not origin.
"""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3

from cache_transfer.contract import HandoffIdentity
from cache_transfer.encoding import encode

DIGEST_BYTES = 32

# blake3 releases the GIL for updates of at least 2 KiB.
_Buffer = bytes | memoryview


def proof(secret: bytes, identity: HandoffIdentity) -> bytes:
    return _keyed(secret, b"pd-proof", encode(identity))


def frame_digest(secret: bytes, header: _Buffer, payload: _Buffer) -> bytes:
    return _keyed(secret, b"pd-frame" + struct.pack("<I", len(header)), header, payload)


def logits_digest(secret: bytes, dtype: str, position: int, data: _Buffer) -> bytes:
    name = dtype.encode()
    return _keyed(secret, b"pd-logit", struct.pack("<I", len(name)) + name + struct.pack("<I", position), data)


def memory_proof(secret: bytes, size: int) -> bytes:
    """What stands at the start of memory that a sender offers."""
    return _keyed(secret, b"pd-share", struct.pack("<Q", size))


class Manifest:
    """Counts and digests what one side sent or received, in stream order."""

    def __init__(self, secret: bytes, identity: HandoffIdentity) -> None:
        self._hasher = blake3(b"pd-manif", key=secret)
        self._identity_digest = identity.digest()
        self.frames = 0
        self.payload_bytes = 0

    def add(self, digest: bytes, payload_bytes: int) -> None:
        self._hasher.update(digest)
        self.frames += 1
        self.payload_bytes += payload_bytes

    def digest(self, logits: bytes, start: int, end: int) -> bytes:
        """Of everything added so far, the digest of the logits, and the range [start, end)."""
        counts = struct.pack("<IQII", self.frames, self.payload_bytes, start, end)
        hasher = self._hasher.copy()
        hasher.update(logits + self._identity_digest + counts)
        return hasher.digest()


def same(left: bytes, right: bytes) -> bool:
    """Whether two digests are equal, in time that does not depend on where they differ."""
    return hmac.compare_digest(left, right)


def _keyed(secret: bytes, tag: bytes, *parts: _Buffer) -> bytes:
    hasher = blake3(tag, key=secret)
    for part in parts:
        hasher.update(part)
    return hasher.digest()
