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
from pdserve.errors import Internal

_FRAME = b"\x12"  # PushRequest.frame; a tag is (field number << 3) | 2 for bytes
_HEADER, _PAYLOAD, _DIGEST = b"\x0a", b"\x12", b"\x1a"  # of Frame
_TRAILER = _DIGEST + bytes([DIGEST_BYTES])
_WRITABLE = 0x200  # PyBUF_WRITE

_api = ctypes.PyDLL(None)
_new_bytes = _api.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = _api.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)
_view_of = _api.PyMemoryView_FromMemory
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class FrameBuffer:
    """The bytes of PushRequest{frame} while they are made: fill `payload`, then `seal`."""

    def __init__(self, header: bytes, payload_bytes: int) -> None:
        before = _HEADER + varint(len(header)) + header + _PAYLOAD + varint(payload_bytes)
        length = len(before) + payload_bytes + len(_TRAILER) + DIGEST_BYTES
        before = _FRAME + varint(length) + before
        size = len(before) + payload_bytes + len(_TRAILER) + DIGEST_BYTES
        self._data: bytes = _new_bytes(None, size)
        self._view: memoryview = _view_of(_address_of(self._data), size, _WRITABLE)
        self._view[: len(before)] = before
        end = len(before) + payload_bytes
        self.payload = self._view[len(before) : end]
        self._view[end : end + len(_TRAILER)] = _TRAILER

    def seal(self, digest: bytes) -> bytes:
        """The finished message. Raises Internal when someone still holds the payload's memory."""
        self._view[-DIGEST_BYTES:] = digest
        try:
            self.payload.release()
            self._view.release()
        except BufferError:
            raise Internal("a source kept the memory of a frame that it filled") from None
        return self._data


def varint(value: int) -> bytes:
    """A non-negative number in protobuf's variable-length encoding."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
