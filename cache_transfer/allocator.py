"""Keeps memory of freed frames in the process.

Frames come and go by the megabyte, several at a time. glibc gives such memory back to the
kernel at once and gets it again as fresh pages: hundreds of page faults per frame, which were
measured to cost more than hashing it. After `keep_freed_frames` blocks below 4 MiB stay in the
heap, which returns memory only when more than 32 MiB of it lie unused at its end.

And there are two such heaps, not one per thread: a freed activation of the engine's thread then
serves the next frame of a transfer thread, instead of staying with a thread that is idle.
"""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEPT_BYTES = 32 << 20
_HEAPS = 2
_LARGEST_KEPT_BLOCK = 4 << 20  # no frame message is larger


@cache
def keep_freed_frames() -> bool:
    """For the whole process, once. False where the C library has no `mallopt` (not glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = (
        (_M_ARENA_MAX, _HEAPS),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK),
    )
    return all(bool(mallopt(option, value)) for option, value in wanted)
