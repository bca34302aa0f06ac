"""Memory of this process that Python's own tools do not see."""

from __future__ import annotations

import ctypes
import gc


class _Heap(ctypes.Structure):
    """As `mallinfo2` of glibc tells it, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "_", "_", "mapped", "_", "_", "used", "unused", "_")  # mallinfo2(3)
    ]


def heap_bytes() -> int:
    """In use outside of Python's own small objects: what gRPC holds is there, and no tool of Python's sees it."""
    gc.collect()
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = _Heap
    return int(asked().used)
