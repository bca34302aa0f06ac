"""What a transfer through shared memory must do to each byte, and how fast two cores could at most do that.

Both sides hash every byte, one gathers it from pages, the other copies it out of the shared memory and scatters
it into pages. Each is timed alone, on one core, on a frame's worth of the case. The bound assumes that both cores are
always busy with nothing else: no event loop, no thread hop, no wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_transfer.digests import frame_digest
from cache_transfer.pages import DirectSource, PageSink, Range

CORES = 2


@dataclass(frozen=True)
class Costs:
    """Seconds of one core per byte."""

    hash: float
    gather: float
    copy: float
    scatter: float

    def shared(self) -> float:
        """Bytes per second through shared memory at most."""
        return CORES / (2 * self.hash + self.gather + self.copy + self.scatter)


def measure_costs(source: DirectSource, sink: PageSink, layers: int, heads: Range, tokens: Range, size: int) -> Costs:
    """Args: `size`: bytes of the payload of `heads` and `tokens` of one plane."""
    room, other = memoryview(bytearray(size)), memoryview(bytearray(size))

    def copy(_: int) -> None:
        other[:] = room

    return Costs(
        hash=_seconds(layers, lambda _: frame_digest(bytes(32), b"", room)) / size,
        gather=_seconds(layers, lambda layer: source.read_into("k", layer, heads, tokens, room)) / size,
        copy=_seconds(layers, copy) / size,
        scatter=_seconds(layers, lambda layer: sink.write("k", layer, heads, tokens, room)) / size,
    )


def _seconds(layers: int, call: Callable[[int], object]) -> float:
    """Of one call, the best round of some; each goes through all layers, as a transfer does."""
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        for layer in range(layers):
            call(layer)
        best = min(best, time.perf_counter() - began)
    return best / layers
