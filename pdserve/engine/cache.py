"""The paged KV cache: storage at fixed addresses.

One allocation for all layers, made once (storage.py). Per layer and plane (k, v):

    hnd   [kv_heads, pages, page_size, head_dim]     one head's pages gather without a permute
    nhd   [pages, page_size, kv_heads, head_dim]     one page's tokens are contiguous

Heads and head_dim may differ from layer to layer, and a layer may have no planes.

A *slot* is page * page_size + offset. Slots of a page after its last written token are
zero, so that a masked read never meets a stale NaN: whoever starts a page clears its tail
(`clear` by the engine, SequenceSink for a received cache). One page beyond the pool, `pad`,
stays zero for ever and fills the tables of shorter sequences in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.large_pages import touch
from pdserve.engine.plan import EngineConfig
from pdserve.engine.spec import ModelSpec
from pdserve.engine.staging import Staging, staging_for
from pdserve.engine.storage import Shape, Storage
from pdserve.errors import ConfigError, Internal

Range = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Places of a payload's rows in a plane, in payload order."""

    index: NDArray[np.intp]
    row_bytes: int

    @cached_property
    def type(self) -> np.dtype[np.void]:
        return np.dtype((np.void, self.row_bytes))

    def view(self, payload: memoryview) -> NDArray[np.void]:
        """The payload as rows. Raises Internal for another size."""
        if payload.nbytes != self.index.size * self.row_bytes:
            raise Internal(f"{payload.nbytes} bytes for {self.index.size} rows of {self.row_bytes}", field="payload")
        return np.frombuffer(payload, self.type)


class Tables:
    """Block tables [B, P] of some sequences. What `gather` needs of them is the same for all layers of one shape."""

    def __init__(self, table: Tensor, run: int) -> None:
        """run: pages that follow one another in memory, of one head or of all together."""
        self._pages, self._run = table.flatten(), run
        self._made: dict[int, Tensor] = {}

    def index(self, runs: int) -> Tensor:
        """[runs * B * P] int64: the pages in each of so many runs."""
        if runs not in self._made:
            starts = torch.arange(runs, device=self._pages.device) * self._run
            self._made[runs] = (starts[:, None] + self._pages).flatten()
        return self._made[runs]


class PagedCache:
    """K and V of every layer. Pages are handed out by a BlockManager; this only stores.

    `storage` is all of it, `planes[layer][name]` one plane: [Hkv, slots, d] of hnd, [slots, Hkv, d] of nhd.

    Threads: the engine writes and gathers in its own thread; `read_pieces`, `read_rows`
    and `write_rows` may run in others at the same time on pages that the engine does not touch.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, staging: Staging | None = None) -> None:
        """staging: how rows move between pages and the host; by default what the device needs. Raises ConfigError."""
        if config.axis_order not in ("hnd", "nhd"):
            raise ConfigError(f"unknown order {config.axis_order!r}", field="axis_order", remedy="use hnd or nhd")
        for name in ("pages", "page_size"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{getattr(config, name)} is too small", field=name, remedy="use at least 1")
        self.layers = spec.layers
        self.pages, self.page_size, self.pad = config.pages, config.page_size, config.pages
        self.heads_first = config.axis_order == "hnd"
        self.dtype_name = config.kv_dtype or config.dtype
        self.dtype = torch_dtype(self.dtype_name, "kv_dtype")
        slots = (config.pages + 1) * config.page_size
        try:
            self._storage = Storage(spec.planes(), slots, self.heads_first, self.dtype, config.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            told = f"no memory for {config.pages} pages of {config.page_size} tokens: {error}"
            raise ConfigError(told, field="pages", remedy="use fewer, or give it more memory") from error
        self.storage, self.planes = self._storage.whole, self._storage.planes
        self._slot_axis = 3 if self.heads_first else 2  # of a block of layers
        self.staging = staging or staging_for(self.storage.device)
        self.written = [0] * self.layers  # tokens whose rows `write` has stored

    @property
    def capacity(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        return self.storage.untyped_storage().nbytes()

    def touch(self) -> None:
        """Takes the pool's memory now and not page by page as it fills; leaves what is in it."""
        if self.storage.device.type == "cpu":
            touch(self.storage.view(torch.uint8).view(-1))

    # -- engine side -----------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [T, Hkv, d] at slots [T] of one layer; of no heads where it has no such plane."""
        for plane, values in zip(self.planes[layer].values(), (k, v), strict=False):
            values = values.to(self.dtype)
            if self.heads_first:
                plane.index_copy_(1, slots, values.transpose(0, 1))
            else:
                plane.index_copy_(0, slots, values)
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
            for block in self._storage.blocks:
                block.index_fill_(self._slot_axis, slots, 0)

    def copy_page(self, source: int, target: int) -> None:
        """The whole content of one page in another, in every layer and plane. For a sequence that is to write in
        what others read.
        """
        size, axis = self.page_size, self._slot_axis
        for block in self._storage.blocks:
            block.narrow(axis, target * size, size).copy_(block.narrow(axis, source * size, size))

    def tables(self, table: Tensor) -> Tables:
        """The pages of table [B, P], for `gather`."""
        return Tables(table, self.pages + 1)

    def gather(self, layer: int, tables: Tables, batch: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, B, P * page_size, d], logical token order; views of one fresh tensor. Of no heads where the layer
        has no such plane.
        """
        block = self._storage.layers[layer]  # [planes, ...]
        if block is None:
            none = self.storage.new_empty(0, batch, 0, 1)
            return none, none
        count, d = block.shape[0], block.shape[-1]
        if self.heads_first:
            heads = block.shape[1]
            rows = block.view(-1, self.page_size * d)
            found = rows.index_select(0, tables.index(count * heads)).view(count, heads, batch, -1, d)
        else:
            heads = block.shape[2]
            rows = block.view(-1, self.page_size * heads * d)
            found = rows.index_select(0, tables.index(count)).view(count, batch, -1, heads, d).permute(0, 3, 1, 2, 4)
        return found[0], found[1] if count > 1 else found[0, :0]

    def tokens(self, layer: int, slots: Tensor) -> Tensor:
        """[..., Hkv, d] for slots [...] of the layer's first plane."""
        plane = next(iter(self.planes[layer].values()))
        found = plane.index_select(self._slot_axis - 2, slots.flatten())
        found = found.transpose(0, 1) if self.heads_first else found
        return found.reshape(*slots.shape, *found.shape[1:])

    def sequence(self, layer: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, d] of one sequence, copied out (for checks and the reference)."""
        table = torch.tensor([list(pages)], dtype=torch.int64, device=self.storage.device)
        k, v = self.gather(layer, self.tables(table), 1)
        return k[:, 0, :length], v[:, 0, :length]

    # -- transfer side ---------------------------------------------------------------------

    def read_pieces(
        self, plane: str, layer: int, heads: Range, tokens: Range, pages: Sequence[int]
    ) -> list[memoryview]:
        """Byte pieces whose concatenation is the canonical [tokens, heads, head_dim] payload.

        No copy where the layout holds the range in canonical order: one head of `hnd`, all
        heads of `nhd`. Otherwise one copied piece. Raises Internal for a range out of bounds.
        """
        shape = self.shape(plane, layer)
        self._check_range(shape, heads, tokens, pages)
        count = heads[1] - heads[0]
        if self.staging is None and self.heads_first and count == 1:
            parts = [self._plane(plane, layer)[heads[0], a:b] for a, b in self._runs(tokens, pages)]
        elif self.staging is None and not self.heads_first and count == shape[0]:
            parts = [self._plane(plane, layer)[a:b] for a, b in self._runs(tokens, pages)]
        else:
            row_bytes = shape[1] * self.storage.element_size()
            whole = np.empty((tokens[1] - tokens[0], count, row_bytes), np.uint8)
            self.read_rows(plane, layer, self.rows(shape, heads, tokens, pages), whole.data.cast("B"))
            parts = [whole]
        return [part.reshape(-1).data for part in parts]

    def shape(self, plane: str, layer: int) -> Shape:
        """Heads and head_dim. Raises Internal for a plane or layer that is not there."""
        if not 0 <= layer < self.layers:
            raise Internal(f"there is no layer {layer}", field="layer")
        if plane not in self._storage.shapes[layer]:
            raise Internal(f"layer {layer} has no plane {plane!r}", field="plane")
        return self._storage.shapes[layer][plane]

    def rows(self, shape: Shape, heads: Range, tokens: Range, pages: Sequence[int]) -> Rows:
        """Where the rows of a canonical payload lie in a plane of this shape, in payload order.

        A row is [head_dim], or [heads, head_dim] where `nhd` holds all heads of a token together.
        The same for all planes of one shape, so a transfer computes it once per range. Raises
        Internal for a range out of bounds.
        """
        self._check_range(shape, heads, tokens, pages)
        token = np.arange(*tokens)
        slot = np.asarray(pages, np.intp)[token // self.page_size] * self.page_size + token % self.page_size
        head = np.arange(*heads)
        row_bytes = shape[1] * self.storage.element_size()
        if self.heads_first:
            return Rows((head * ((self.pages + 1) * self.page_size) + slot[:, None]).reshape(-1), row_bytes)
        if head.size == shape[0]:
            return Rows(slot, row_bytes * shape[0])
        return Rows((slot[:, None] * shape[0] + head).reshape(-1), row_bytes)

    def read_rows(self, plane: str, layer: int, rows: Rows, out: memoryview) -> None:
        """Copies rows into `out`. Raises Internal when its size is another, or for a plane that is not there."""
        self.shape(plane, layer)
        if self.staging is not None:
            host = rows.view(out).view(np.uint8).reshape(-1, rows.row_bytes)
            self.staging.read(self._device_rows(plane, layer, rows), rows.index, host)
            return
        source = self._plane(plane, layer).reshape(-1).view(rows.type)
        source.take(rows.index, None, rows.view(out), "clip")

    def write_rows(self, plane: str, layer: int, rows: Rows, payload: memoryview) -> None:
        """The inverse; on a device it is queued, and the next step comes after it. Raises Internal as `read_rows`."""
        self.shape(plane, layer)
        values = rows.view(payload)
        if self.staging is not None:
            host = values.view(np.uint8).reshape(-1, rows.row_bytes)
            self.staging.write(self._device_rows(plane, layer, rows), rows.index, host)
            return
        self._plane(plane, layer).reshape(-1).view(rows.type)[rows.index] = values

    def _device_rows(self, plane: str, layer: int, rows: Rows) -> Tensor:
        """A plane as [rows, scalars of a row]; only the rows asked for may be touched: others are in use."""
        return self.planes[layer][plane].view(-1, rows.row_bytes // self.storage.element_size())

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

    def _plane(self, plane: str, layer: int) -> NDArray[np.uint8]:
        array = self._storage.bytes[layer].get(plane)
        if array is None:
            raise Internal(f"the host cannot see memory of {self.storage.device}", field="cache")
        return array

    def _check_range(self, shape: Shape, heads: Range, tokens: Range, pages: Sequence[int]) -> None:
        if not 0 <= heads[0] < heads[1] <= shape[0]:
            raise Internal(f"heads {heads} are not among {shape[0]}", field="heads")
        if not 0 <= tokens[0] < tokens[1] <= len(pages) * self.page_size:
            raise Internal(f"tokens {tokens} are not in {len(pages)} pages", field="tokens")
        for page in pages[tokens[0] // self.page_size : -(-tokens[1] // self.page_size)]:
            if not 0 <= page < self.pages:
                raise Internal(f"there is no page {page}", field="pages")
