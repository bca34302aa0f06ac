"""One sequence's part of the paged cache, as the transfer reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from pdserve.engine.cache import PagedCache, Range, Rows
from pdserve.engine.dtypes import cast_bytes, torch_dtype
from pdserve.errors import Internal


class _RowIndex:
    """Remembers `rows` of the ranges asked for last: all planes of one shape ask for the same."""

    def __init__(self, cache: PagedCache, pages: tuple[int, ...]) -> None:
        self._cache = cache
        self._rows = lru_cache(maxsize=8)(lambda shape, heads, tokens: cache.rows(shape, heads, tokens, pages))

    def __call__(self, plane: str, layer: int, heads: Range, tokens: Range) -> Rows:
        return self._rows(self._cache.shape(plane, layer), heads, tokens)


class SequenceSource:
    """One sequence's cache for a sender (cache_transfer.pages.DirectSource): tokens [start, end)."""

    def __init__(self, cache: PagedCache, pages: Sequence[int], start: int, end: int) -> None:
        self._cache, self._pages, self._range = cache, tuple(pages), (start, end)
        self._rows = _RowIndex(cache, self._pages)

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> list[memoryview]:
        """Pieces of the canonical payload. Raises Internal outside the sequence's range."""
        _inside(tokens, self._range)
        return self._cache.read_pieces(plane, layer, heads, tokens, self._pages)

    def read_into(self, plane: str, layer: int, heads: Range, tokens: Range, out: memoryview) -> None:
        """The canonical payload, copied into `out`. Raises Internal as `read`, or for another size."""
        _inside(tokens, self._range)
        self._cache.read_rows(plane, layer, self._rows(plane, layer, heads, tokens), out)


class SequenceSink:
    """Granted pages for a receiver (cache_transfer.pages.PageSink): tokens [start, end).

    Clears the slots after `end` in the last page, so that decode never reads what an
    earlier owner of the page left there. Payloads in another `dtype` than the cache's (a name;
    empty: the cache's) are cast as they are written.
    """

    def __init__(self, cache: PagedCache, pages: Sequence[int], start: int, end: int, dtype: str = "") -> None:
        self._cache, self._pages, self._range = cache, tuple(pages), (start, end)
        self._dtype = torch_dtype(dtype or cache.dtype_name)
        self._rows = _RowIndex(cache, self._pages)
        last = -(-end // cache.page_size) * cache.page_size
        if not 0 <= start <= end or last > len(self._pages) * cache.page_size:
            raise Internal(f"tokens {self._range} do not fit {len(self._pages)} pages", field="pages")
        if last > end:
            tail = cache.slots((end, last), self._pages)
            cache.clear(torch.tensor(tail, dtype=torch.int64, device=cache.storage.device))

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        """Copies a canonical payload. Raises Internal outside the granted range, or for another size."""
        _inside(tokens, self._range)
        if self._dtype != self._cache.dtype:
            payload = cast_bytes(payload, self._dtype, self._cache.dtype)
        self._cache.write_rows(plane, layer, self._rows(plane, layer, heads, tokens), payload)


def _inside(tokens: Range, allowed: Range) -> None:
    if not allowed[0] <= tokens[0] < tokens[1] <= allowed[1]:
        raise Internal(f"tokens {tokens} are outside the bound range {allowed}", field="tokens")
