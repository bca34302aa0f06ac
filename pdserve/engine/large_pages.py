"""Memory in large pages: what a step reads from front to back, weights and cache, then takes few of the processor's
page entries. The system may give small pages all the same.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
STRETCH = 32 << 20  # most that weights share
LINE = 64


def zeros(count: int) -> Tensor:
    """uint8 [count], from the beginning of a large page. Raises MemoryError."""
    try:
        mapped = mmap.mmap(-1, count + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{count} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=start)


def touch(memory: Tensor) -> None:
    """Takes the memory of uint8 [count] now, and leaves what is in it: no step waits for the system to clear pages, and
    where there is too little a process ends before it serves.
    """
    memory[:: mmap.PAGESIZE].bitwise_or_(0)


class Room:
    """Tensors one after the other, so that small ones share large pages, too. Freed when all of a stretch are."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._size = LARGE_PAGE  # of the next stretch: as much as there is already

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """With anything in it. Raises MemoryError."""
        need = math.prod(shape) * dtype.itemsize
        if self._left.numel() < need:
            self._left = zeros(max(need, self._size))
            self._size = min(2 * self._size, STRETCH)
        mine = self._left[:need].view(dtype).view(shape)
        self._left = self._left[-(-need // LINE) * LINE :]
        return mine
