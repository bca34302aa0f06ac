"""How fast this machine is, measured: the two rates that bound a step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.ledger import Machine

_SIDE = 2048  # of the square matrices: large enough that their product is bound by arithmetic
_READ_BYTES = 256 << 20  # larger than any processor's caches
_REPEATS = 5


def measure_machine(dtype: str, threads: int, device: str = "cpu") -> Machine:
    """The best of a few runs: FLOP/s of a square product in `dtype`, bytes/s of reading memory once.

    Sets torch's number of threads for the whole process. Takes about a second.
    """
    torch.set_num_threads(threads)
    left = torch.randn(_SIDE, _SIDE, device=device).to(torch_dtype(dtype))
    right = torch.randn(_SIDE, _SIDE, device=device).to(torch_dtype(dtype))
    memory = torch.ones(_READ_BYTES // 4, device=device)
    product_s = _fastest(lambda: left @ right, device)
    read_s = _fastest(memory.sum, device)
    return Machine(2 * _SIDE**3 / product_s, _READ_BYTES / read_s)


def _fastest(work: Callable[[], object], device: str) -> float:
    """Seconds of the fastest run after a first one that does not count."""
    best = float("inf")
    for number in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        if number:
            best = min(best, time.perf_counter() - began)
    return best
