"""Pages of one sequence as numpy arrays: sources and sinks for a transfer, plain and held back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import (
    WorkerContract,
)
from cache_transfer.pages import KVSource, Range

Array = npt.NDArray[np.uint8]
WAIT_S = 10.0  # only a test that fails waits so long


class Pages:
    """Pages of one sequence, in scattered order: [page, heads, slot, bytes] (hnd) or [page, slot, heads, bytes]."""

    def __init__(self, contract: WorkerContract, tokens: int, seed: int = 0) -> None:
        self._size = contract.page_size
        self._nhd = contract.page_axis_order == "nhd"
        count = -(-tokens // self._size)
        self._table = np.random.default_rng(seed).permutation(count)
        item = ITEM_BYTES[contract.kv_dtype]
        self._pages: dict[tuple[str, int], Array] = {}
        for layer, planes in enumerate(contract.planes):
            for plane in planes:
                inner = (self._size, plane.heads) if self._nhd else (plane.heads, self._size)
                shape = (count, *inner, plane.head_dim * item)
                self._pages[plane.name, layer] = np.full(shape, 0xEE, np.uint8)

    def view(self, plane: str, layer: int, token: int) -> Array:
        """The slot of one token: [heads, bytes]."""
        page: Array = self._pages[plane, layer][self._table[token // self._size]]
        return page[token % self._size] if self._nhd else page[:, token % self._size]


class NumpySource(Pages):
    """A KVSource: one piece per token."""

    def fill(self, cache: dict[tuple[str, int], Array]) -> Self:
        for (plane, layer), data in cache.items():
            for token in range(len(data)):
                self.view(plane, layer, token)[:] = data[token]
        return self

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        return [np.ascontiguousarray(self.view(plane, layer, t)[slice(*heads)]).data.cast("B") for t in range(*tokens)]


class DirectNumpySource(NumpySource):
    """A DirectSource; `read` must not be used."""

    def read_into(self, plane: str, layer: int, heads: Range, tokens: Range, out: memoryview) -> None:
        rows = np.frombuffer(out, np.uint8).reshape(tokens[1] - tokens[0], heads[1] - heads[0], -1)
        for row, token in zip(rows, range(*tokens), strict=True):
            row[:] = self.view(plane, layer, token)[slice(*heads)]

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        raise AssertionError("read_into was there")


class NumpySink(Pages):
    """A PageSink. Counts writes; `closed` pages must never be written."""

    def __init__(self, contract: WorkerContract, tokens: int, seed: int = 1) -> None:
        super().__init__(contract, tokens, seed)
        self._contract = contract
        self.writes = 0
        self.closed = False
        self.written_after_close = False

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self.written_after_close |= self.closed
        self.writes += 1
        rows = np.frombuffer(payload, np.uint8).reshape(tokens[1] - tokens[0], heads[1] - heads[0], -1)
        for row, token in zip(rows, range(*tokens), strict=True):
            self.view(plane, layer, token)[slice(*heads)] = row

    def content(self, tokens: int) -> dict[tuple[str, int], Array]:
        return {
            (plane, layer): np.stack([self.view(plane, layer, t) for t in range(tokens)])
            for plane, layer in self._pages
        }


class GatedSource:
    """A source whose reads wait until `gate` is set; `reading` says that one waits."""

    def __init__(self, source: KVSource) -> None:
        self._source = source
        self.gate = threading.Event()
        self.reading = threading.Event()
        self.busy = 0

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        self.busy += 1
        self.reading.set()
        self.gate.wait(WAIT_S)
        try:
            return self._source.read(plane, layer, heads, tokens)
        finally:
            self.busy -= 1
