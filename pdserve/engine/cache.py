"""The paged KV cache: storage at fixed addresses.

One allocation for all layers, made once. Per layer and plane (k, v):

    hnd   [kv_heads, pages, page_size, head_dim]     one head's pages gather without a permute
    nhd   [pages, page_size, kv_heads, head_dim]     one page's tokens are contiguous

A *slot* is page * page_size + offset. Slots of a page after its last written token are
zero, so that a masked read never meets a stale NaN: whoever starts a page clears its tail
(`clear` by the engine, SequenceSink for a received cache). One page beyond the pool, `pad`,
stays zero for ever and fills the tables of shorter sequences in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.plan import EngineConfig
from pdserve.engine.spec import ModelSpec
from pdserve.engine.staging import Staging, staging_for
from pdserve.errors import ConfigError, Internal

PLANES = {"k": 0, "v": 1}
Range = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Places of a payload's rows in a plane, in payload order."""

    index: NDArray[np.intp]
    row_bytes: int

    @property
    def type(self) -> np.dtype[np.void]:
        return np.dtype((np.void, self.row_bytes))

    def view(self, payload: memoryview) -> NDArray[np.void]:
        """The payload as rows. Raises Internal for another size."""
        if payload.nbytes != self.index.size * self.row_bytes:
            raise Internal(f"{payload.nbytes} bytes for {self.index.size} rows of {self.row_bytes}", field="payload")
        return np.frombuffer(payload, self.type)


class PagedCache:
    """K and V of every layer. Pages are handed out by a BlockManager; this only stores.

    Threads: the engine writes and gathers in its own thread; `read_pieces`, `read_rows`
    and `write_rows` may run in others at the same time on pages that the engine does not touch.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, staging: Staging | None = None) -> None:
        """staging: how rows move between pages and the host; by default what the device needs."""
        if config.axis_order not in ("hnd", "nhd"):
            raise ConfigError(f"unknown order {config.axis_order!r}", field="axis_order", remedy="use hnd or nhd")
        for name in ("pages", "page_size"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{getattr(config, name)} is too small", field=name, remedy="use at least 1")
        self.layers, self.heads, self.head_dim = spec.layers, spec.kv_heads, spec.head_dim
        self.pages, self.page_size, self.pad = config.pages, config.page_size, config.pages
        self.heads_first = config.axis_order == "hnd"
        self.dtype_name = config.kv_dtype or config.dtype
        self.dtype = torch_dtype(self.dtype_name, "kv_dtype")
        slots = (config.pages + 1) * config.page_size
        token = (slots, self.heads) if not self.heads_first else (self.heads, slots)
        # [layers, 2, Hkv, slots, d] or [layers, 2, slots, Hkv, d]
        self.storage = torch.zeros(self.layers, 2, *token, self.head_dim, dtype=self.dtype, device=config.device)
        self._slot_axis = 3 if self.heads_first else 2
        self.staging = staging or staging_for(self.storage.device)
        self._bytes = self._byte_view()
        self.written = [0] * self.layers  # rows that `write` has stored

    @property
    def capacity(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        return self.storage.untyped_storage().nbytes()

    # -- engine side -----------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [T, Hkv, d] at slots [T] of one layer."""
        for plane, values in enumerate((k, v)):
            values = values.to(self.dtype)
            if self.heads_first:
                self.storage[layer, plane].index_copy_(1, slots, values.transpose(0, 1))
            else:
                self.storage[layer, plane].index_copy_(0, slots, values)
        self.written[layer] += slots.shape[0]
        self.mark()

    def mark(self) -> None:
        """What is queued so far is written before rows are read for the host."""
        if self.staging is not None:
            self.staging.lane.mark()

    def join(self) -> None:
        """Rows that the host has written are in their pages before what the engine queues next."""
        if self.staging is not None:
            self.staging.lane.join()

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots [n] in every layer and plane."""
        if slots.numel():
            self.storage.index_fill_(self._slot_axis, slots, 0)

    def copy_page(self, source: int, target: int) -> None:
        """The whole content of one page in another, in every layer and plane. For a sequence that is to write in
        what others read.
        """
        size, axis = self.page_size, self._slot_axis
        self.storage.narrow(axis, target * size, size).copy_(self.storage.narrow(axis, source * size, size))

    def gather_index(self, table: Tensor) -> Tensor:
        """What `gather` needs for the pages of table [B, P]: the same for every layer."""
        flat = table.flatten()
        blocks = 2 * self.heads if self.heads_first else 2
        starts = torch.arange(blocks, device=flat.device) * (self.pages + 1)
        return (starts[:, None] + flat).flatten()

    def gather(self, layer: int, index: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, B, P * page_size, d], logical token order; a view of one fresh tensor."""
        if self.heads_first:
            rows = self.storage[layer].view(-1, self.page_size * self.head_dim)
            found = rows.index_select(0, index).view(2, self.heads, batch, -1, self.head_dim)
            return found[0], found[1]
        rows = self.storage[layer].view(-1, self.page_size * self.heads * self.head_dim)
        found = rows.index_select(0, index).view(2, batch, -1, self.heads, self.head_dim).permute(0, 3, 1, 2, 4)
        return found[0], found[1]

    def sequence(self, layer: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, d] of one sequence, copied out (for checks and the reference)."""
        table = torch.tensor([list(pages)], dtype=torch.int64, device=self.storage.device)
        k, v = self.gather(layer, self.gather_index(table), 1)
        return k[:, 0, :length], v[:, 0, :length]

    # -- transfer side ---------------------------------------------------------------------

    def read_pieces(
        self, plane: str, layer: int, heads: Range, tokens: Range, pages: Sequence[int]
    ) -> list[memoryview]:
        """Byte pieces whose concatenation is the canonical [tokens, heads, head_dim] payload.

        No copy where the layout holds the range in canonical order: one head of `hnd`, all
        heads of `nhd`. Otherwise one copied piece. Raises Internal for a range out of bounds.
        """
        self._check_plane(plane, layer)
        self._check_range(heads, tokens, pages)
        count = heads[1] - heads[0]
        if self.staging is None and self.heads_first and count == 1:
            parts = [self._plane(plane, layer)[heads[0], a:b] for a, b in self._runs(tokens, pages)]
        elif self.staging is None and not self.heads_first and count == self.heads:
            parts = [self._plane(plane, layer)[a:b] for a, b in self._runs(tokens, pages)]
        else:
            row_bytes = self.head_dim * self.storage.element_size()
            whole = np.empty((tokens[1] - tokens[0], count, row_bytes), np.uint8)
            self.read_rows(plane, layer, self.rows(heads, tokens, pages), whole.data.cast("B"))
            parts = [whole]
        return [part.reshape(-1).data for part in parts]

    def rows(self, heads: Range, tokens: Range, pages: Sequence[int]) -> Rows:
        """Where the rows of a canonical payload lie in a plane, in payload order.

        A row is [head_dim], or [heads, head_dim] where `nhd` holds all heads of a token together.
        The same for every layer and plane, so a transfer computes it once per range. Raises
        Internal for a range out of bounds.
        """
        self._check_range(heads, tokens, pages)
        token = np.arange(*tokens)
        slot = np.asarray(pages, np.intp)[token // self.page_size] * self.page_size + token % self.page_size
        head = np.arange(*heads)
        row_bytes = self.head_dim * self.storage.element_size()
        if self.heads_first:
            return Rows((head * ((self.pages + 1) * self.page_size) + slot[:, None]).reshape(-1), row_bytes)
        if head.size == self.heads:
            return Rows(slot, row_bytes * self.heads)
        return Rows((slot[:, None] * self.heads + head).reshape(-1), row_bytes)

    def read_rows(self, plane: str, layer: int, rows: Rows, out: memoryview) -> None:
        """Copies rows into `out`. Raises Internal when its size is another, or for a plane that is not there."""
        self._check_plane(plane, layer)
        if self.staging is not None:
            host = rows.view(out).view(np.uint8).reshape(-1, rows.row_bytes)
            self.staging.read(self._device_rows(plane, layer, rows), rows.index, host)
            return
        source = self._plane(plane, layer).reshape(-1).view(rows.type)
        np.take(source, rows.index, out=rows.view(out), mode="clip")

    def write_rows(self, plane: str, layer: int, rows: Rows, payload: memoryview) -> None:
        """The inverse; on a device it is queued, and the next step comes after it. Raises Internal as `read_rows`."""
        self._check_plane(plane, layer)
        values = rows.view(payload)
        if self.staging is not None:
            host = values.view(np.uint8).reshape(-1, rows.row_bytes)
            self.staging.write(self._device_rows(plane, layer, rows), rows.index, host)
            return
        self._plane(plane, layer).reshape(-1).view(rows.type)[rows.index] = values

    def _device_rows(self, plane: str, layer: int, rows: Rows) -> Tensor:
        """A plane as [rows, scalars of a row]; only the rows asked for may be touched: others are in use."""
        return self.storage[layer, PLANES[plane]].view(-1, rows.row_bytes // self.storage.element_size())

    def slots(self, tokens: Range, pages: Sequence[int]) -> list[int]:
        """The slot of each token in [start, end)."""
        return [slot for a, b in self._runs(tokens, pages) for slot in range(a, b)]

    def _runs(self, tokens: Range, pages: Sequence[int]) -> Iterator[Range]:
        """Slot ranges of a token range; neighbouring pages give one run."""
        size, at = self.page_size, tokens[0]
        start = end = -1
        while at < tokens[1]:
            stop = min(tokens[1], (at // size + 1) * size)
            slot = pages[at // size] * size + at % size
            if slot != end:
                if end > start:
                    yield start, end
                start = slot
            end = slot + stop - at
            at = stop
        if end > start:
            yield start, end

    def _byte_view(self) -> NDArray[np.uint8] | None:
        """The storage as bytes without a copy; None on a device that numpy cannot see."""
        if self.storage.device.type != "cpu":
            return None
        array: NDArray[np.uint8] = self.storage.view(torch.uint8).numpy()
        return array

    def _plane(self, plane: str, layer: int) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise Internal(f"the host cannot see memory of {self.storage.device}", field="cache")
        array: NDArray[np.uint8] = self._bytes[layer, PLANES[plane]]
        return array

    def _check_plane(self, plane: str, layer: int) -> None:
        if plane not in PLANES:
            raise Internal(f"there is no plane {plane!r}", field="plane")
        if not 0 <= layer < self.layers:
            raise Internal(f"there is no layer {layer}", field="layer")

    def _check_range(self, heads: Range, tokens: Range, pages: Sequence[int]) -> None:
        if not 0 <= heads[0] < heads[1] <= self.heads:
            raise Internal(f"heads {heads} are not among {self.heads}", field="heads")
        if not 0 <= tokens[0] < tokens[1] <= len(pages) * self.page_size:
            raise Internal(f"tokens {tokens} are not in {len(pages)} pages", field="tokens")
        for page in pages[tokens[0] // self.page_size : -(-tokens[1] // self.page_size)]:
            if not 0 <= page < self.pages:
                raise Internal(f"there is no page {page}", field="pages")
