"""A message of frames that is filled in place, so that a cache is copied once on its way out.

A digest stands behind the payload it covers, and gRPC takes nothing but `bytes`. Joining
pieces would need the digests first, hence a pass over scattered pieces. So the message is
allocated as one new `bytes`, the payloads are copied into it, hashed there, and the digests
written last. The C API allows exactly this to whoever just created the object
(PyBytes_FromStringAndSize with NULL); nobody else sees it before `seal`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cache_transfer.digests import DIGEST_BYTES

_FRAME, _FRAMES = b"\x12", b"\x32"  # PushRequest.frame, .frames; a tag is (field number << 3) | 2 for bytes
_ONE_OF_FRAMES = b"\x0a"  # Frames.frames
_HEADER, _PAYLOAD, _DIGEST = b"\x0a", b"\x12", b"\x1a"  # of Frame
_TRAILER = _DIGEST + bytes([DIGEST_BYTES])
_TRAILER_BYTES = len(_TRAILER) + DIGEST_BYTES

_api = ctypes.PyDLL(None)
_new_bytes = _api.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = _api.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


class FrameBuffer:
    """The bytes of PushRequest{frame}, or of PushRequest{frames} for several: fill `payloads`, then `seal`."""

    def __init__(self, frames: Sequence[tuple[bytes, int]]) -> None:
        """`frames`: header and payload bytes of each."""
        fronts = [_HEADER + varint(len(header)) + header + _PAYLOAD + varint(size) for header, size in frames]
        sizes = [len(front) + size + _TRAILER_BYTES for front, (_, size) in zip(fronts, frames, strict=True)]
        tag = _FRAME if len(frames) == 1 else _ONE_OF_FRAMES
        fronts = [tag + varint(size) + front for front, size in zip(fronts, sizes, strict=True)]
        length = sum(len(front) + size + _TRAILER_BYTES for front, (_, size) in zip(fronts, frames, strict=True))
        around = b"" if len(frames) == 1 else _FRAMES + varint(length)
        self._data: bytes = _new_bytes(None, len(around) + length)
        self._view = _writable(self._data)
        self._view[: len(around)] = around
        self.payloads: list[memoryview] = []
        self._digests: list[memoryview] = []
        at = len(around)
        for front, (_, size) in zip(fronts, frames, strict=True):
            self._view[at : at + len(front)] = front
            at += len(front)
            self.payloads.append(self._view[at : at + size])
            at += size
            self._view[at : at + len(_TRAILER)] = _TRAILER
            at += _TRAILER_BYTES
            self._digests.append(self._view[at - DIGEST_BYTES : at])

    def seal(self, digests: Sequence[bytes]) -> bytes:
        """The finished message. `payloads` can no longer be used."""
        for place, digest in zip(self._digests, digests, strict=True):
            place[:] = digest
        for view in (*self.payloads, *self._digests, self._view):
            view.release()
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
