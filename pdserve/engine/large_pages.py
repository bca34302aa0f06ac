"""Memory in large pages: what a step reads from front to back, weights and cache, then takes few of the processor's
page entries. The system may give small pages all the same. What is not written to takes no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
STRETCH = 32 << 20  # that tensors share
LINE = 64


def zeros(count: int) -> Tensor:
    """uint8 [count], from the beginning of a large page. Raises MemoryError."""
    return _Stretch(count).take(count)


def touch(memory: Tensor) -> None:
    """Takes the memory of uint8 [count] now, and leaves what is in it: no step waits for the system to clear pages, and
    where there is too little a process ends before it serves.
    """
    memory[:: mmap.PAGESIZE].bitwise_or_(0)


def trim_heap() -> None:
    """Gives back what is free in the heap, where the C library can: freed weights would stay the process's for good."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Room:
    """Tensors one after the other, so that small ones share large pages, too; freed when all of a stretch are."""

    def __init__(self) -> None:
        self._stretch: _Stretch | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """With anything in it. Raises MemoryError."""
        need = math.prod(shape) * dtype.itemsize
        if self._stretch is None or self._stretch.left < need:
            self._stretch = _Stretch(max(need, STRETCH))
        return self._stretch.take(need).view(dtype).view(shape)


class _Stretch:
    """One mapping, cut into tensors that each keep it."""

    def __init__(self, size: int) -> None:
        try:
            self._mapped = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{size} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that was built without large pages
                self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self._at = -torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr() % LARGE_PAGE
        self._end = self._at + size

    @property
    def left(self) -> int:
        """Bytes."""
        return self._end - self._at

    def take(self, count: int) -> Tensor:
        """uint8 [count], the next of them."""
        mine = torch.frombuffer(self._mapped, dtype=torch.uint8, count=count, offset=self._at)
        self._at += -(-count // LINE) * LINE
        return mine
