"""A frame message that is filled in place, so that a cache is copied once on its way out.

The digest stands behind the payload it covers, and gRPC takes nothing but `bytes`. Joining
pieces would need the digest first, hence a pass over scattered pieces. So the message is
allocated as one new `bytes`, the payload is copied into it, hashed there, and the digest
written last. The C API allows exactly this to whoever just created the object
(PyBytes_FromStringAndSize with NULL); nobody else sees it before `seal`.
"""

from __future__ import annotations

import ctypes

from cache_transfer.digests import DIGEST_BYTES

_FRAME = b"\x12"  # PushRequest.frame; a tag is (field number << 3) | 2 for bytes
_HEADER, _PAYLOAD, _DIGEST = b"\x0a", b"\x12", b"\x1a"  # of Frame
_TRAILER = _DIGEST + bytes([DIGEST_BYTES])

_api = ctypes.PyDLL(None)
_new_bytes = _api.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = _api.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class FrameBuffer:
    """The bytes of PushRequest{frame} while they are made: fill `payload`, then `seal`."""

    def __init__(self, header: bytes, payload_bytes: int) -> None:
        before = _HEADER + varint(len(header)) + header + _PAYLOAD + varint(payload_bytes)
        length = len(before) + payload_bytes + len(_TRAILER) + DIGEST_BYTES
        before = _FRAME + varint(length) + before
        size = len(before) + payload_bytes + len(_TRAILER) + DIGEST_BYTES
        self._data: bytes = _new_bytes(None, size)
        self._view = _writable(self._data)
        self._view[: len(before)] = before
        end = len(before) + payload_bytes
        self.payload = self._view[len(before) : end]
        self._view[end : end + len(_TRAILER)] = _TRAILER

    def seal(self, digest: bytes) -> bytes:
        """The finished message. `payload` can no longer be used."""
        self._view[-DIGEST_BYTES:] = digest
        self.payload.release()
        self._view.release()
        return self._data


def _writable(data: bytes) -> memoryview:
    """Its memory. Keeps `data` alive, so whatever a caller does with the view, it never dangles."""
    array = (ctypes.c_ubyte * len(data)).from_address(_address_of(data))
    array.owner = data  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def varint(value: int) -> bytes:
    """A non-negative number in protobuf's variable-length encoding."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
