"""A step plan checked and laid out as tensors.

Rows are the tokens of all chunks: first the chunks of several tokens, in plan order, then
the one-token chunks, shortest sequence first, so that each group of them is a range of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pdserve.engine.adapters import AdapterRows
from pdserve.engine.cache import PagedCache, Tables
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.errors import Internal, InvalidRequest
from pdserve.request import check_token_ids

# One-token sequences share a padded read as long as the longest has at most this many times
# the pages of the shortest.
_SPREAD = 1.5
_SPREAD_PAGES = 4
# So many rows of the last layer cost more than laying the others out by themselves.
_WORTH_LEAVING_OUT = 32


@dataclass
class Group:
    """Sequences whose attention runs as one call: one prefill chunk, or B one-token chunks."""

    first_row: int
    end_row: int
    tables: Tables
    batch: int  # sequences
    keys: int  # the longest visible length
    decode: bool


@dataclass
class Batch:
    """One step's tensors. `ids`, `positions`, `places`, `slots`: [T] int64."""

    chunks: list[Chunk]  # in row order
    ids: Tensor
    positions: Tensor  # what embedding and rotation see
    places: Tensor  # index of each token in its own sequence: what visibility counts
    slots: Tensor
    stale: Tensor  # slots after the last token of a page just begun
    wanted: list[tuple[str, int, int]]  # key, rows [first, end) of the logits
    wanted_rows: Tensor
    cache: PagedCache
    adapters: AdapterRows | None = None  # None: every row is the base model's
    _before: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[Group]:
        """How the plain path reads the cache; made when it asks."""
        many = [chunk for chunk in self.chunks if len(chunk.ids) > 1]
        return _groups(many, self.chunks[len(many) :], self.cache)

    def bounds(self, window: int) -> tuple[Tensor, Tensor]:
        """Each row sees the keys [first, end) of its own sequence. int64 [T] each."""
        end = self.places + 1
        first = (end - window).clamp(min=0) if window else torch.zeros_like(end)
        return first, end

    def before(self, tokens: int) -> Tensor:
        """[T, tokens] int64: slots of the last tokens of each row's own sequence, itself the last; one that is zero for
        ever where there is none.
        """
        if tokens not in self._before:
            runs = [_last(chunk, tokens, self.cache).unfold(0, tokens, 1) for chunk in self.chunks]
            self._before[tokens] = torch.cat(runs).to(self.slots.device)
        return self._before[tokens]


def lay_out(plan: StepPlan, cache: PagedCache) -> Batch:
    """Tensors of a plan that `check_plan` accepted."""
    many = [chunk for chunk in plan.chunks if len(chunk.ids) > 1]
    ones = sorted((chunk for chunk in plan.chunks if len(chunk.ids) == 1), key=lambda chunk: chunk.start)
    chunks = many + ones
    wanted: list[tuple[str, int, int]] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        found = _wanted_rows(chunk, row)
        if found:
            wanted.append((chunk.key, len(rows), len(rows) + len(found)))
        rows.extend(found)
        row += len(chunk.ids)
    device = cache.storage.device
    return Batch(
        chunks=chunks,
        ids=_int64([token for chunk in chunks for token in chunk.ids], device),
        positions=_int64([position for chunk in chunks for position in _positions(chunk)], device),
        places=_int64([place for chunk in chunks for place in range(*_written(chunk))], device),
        slots=_int64([slot for chunk in chunks for slot in cache.slots(_written(chunk), chunk.pages)], device),
        stale=stale_slots(chunks, cache),
        wanted=wanted,
        wanted_rows=_int64(rows, device),
        cache=cache,
    )


def wanted_part(batch: Batch) -> tuple[Batch, Tensor] | None:
    """The rows whose logits are asked for as a batch of their own, and which rows of the whole they are, [n] int64.

    What comes after K and V of the last layer is for them alone. A sequence's one row becomes a one-token chunk.
    None: too few rows are left out.
    """
    if batch.ids.shape[0] - batch.wanted_rows.shape[0] < _WORTH_LEAVING_OUT:
        return None
    rows: dict[str, range] = {}
    chunks: list[Chunk] = []
    row = 0
    for chunk in batch.chunks:
        found = _wanted_rows(chunk, row)
        if found:
            start = chunk.start + found.start - row
            chunks.append(replace(chunk, ids=chunk.ids[-len(found) :], start=start, logits="all"))
            rows[chunk.key] = found
        row += len(chunk.ids)
    part = lay_out(StepPlan(tuple(chunks)), batch.cache)
    return part, _int64([row for chunk in part.chunks for row in rows[chunk.key]], batch.wanted_rows.device)


def stale_slots(chunks: Sequence[Chunk], cache: PagedCache) -> Tensor:
    """[n] int64: slots after the last token of the pages that these chunks begin."""
    return _int64([slot for chunk in chunks for slot in _stale(chunk, cache)], cache.storage.device)


def check_plan(plan: StepPlan, spec: ModelSpec, cache: PagedCache) -> None:
    """Refuses what cannot run, before any layer: InvalidRequest for a request's fault, Internal for a scheduler's."""
    if not plan.chunks:
        raise InvalidRequest(
            "a step needs at least one chunk", reason="EMPTY_STEP", field="chunks", remedy="give it one, or run no step"
        )
    keys = {chunk.key for chunk in plan.chunks}
    if len(keys) != len(plan.chunks):
        raise Internal("two chunks of a step have one key", reason="DUPLICATE_KEY", field="chunks")
    written: set[int] = set()
    for chunk in plan.chunks:
        _check_chunk(chunk, spec, cache)
        first, end = chunk.start // cache.page_size, -(-(chunk.start + len(chunk.ids)) // cache.page_size)
        pages = chunk.pages[first:end]
        if written.intersection(pages) or len(set(pages)) < len(pages):
            raise Internal("two writers for one page in a step", reason="SHARED_PAGE", field=chunk.key)
        written.update(pages)


def _check_chunk(chunk: Chunk, spec: ModelSpec, cache: PagedCache) -> None:
    check_token_ids(chunk.ids, spec.vocab_size, f"chunk {chunk.key}")
    if chunk.start < 0:
        raise InvalidRequest(
            f"{chunk.start} is no position", reason="NEGATIVE_START", field=chunk.key, remedy="begin at 0 or later"
        )
    end = chunk.start + len(chunk.ids)
    if end > spec.context_limit:
        raise InvalidRequest(
            f"{end} tokens exceed the model's context of {spec.context_limit}",
            reason="PROMPT_TOO_LONG",
            field=chunk.key,
            remedy="shorten the prompt or lower max_tokens",
        )
    if end > len(chunk.pages) * cache.page_size:
        raise InvalidRequest(
            f"{len(chunk.pages)} pages of {cache.page_size} tokens cannot hold {end}",
            reason="PAGES_TOO_FEW",
            field=chunk.key,
            remedy="allocate pages before the step",
        )
    for page in chunk.pages:
        if not 0 <= page < cache.pages:
            raise Internal(f"there is no page {page}", reason="PAGE_OUT_OF_RANGE", field=chunk.key)
    if chunk.logits not in ("none", "last", "all"):
        raise InvalidRequest(
            f"{chunk.logits!r} is not a choice",
            reason="INVALID_LOGITS",
            field=chunk.key,
            remedy="use none, last or all",
        )


def _int64(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _written(chunk: Chunk) -> tuple[int, int]:
    return chunk.start, chunk.start + len(chunk.ids)


def _stale(chunk: Chunk, cache: PagedCache) -> Sequence[int]:
    """Slots after the chunk in a page that it may be the first to write.

    A single token in the middle of a page cannot be: whoever wrote the token before it, a
    chunk or a SequenceSink, has cleared the rest.
    """
    size, end = cache.page_size, chunk.start + len(chunk.ids)
    if end % size == 0 or (len(chunk.ids) == 1 and chunk.start % size):
        return ()
    return cache.slots((end, -(-end // size) * size), chunk.pages)


def _last(chunk: Chunk, tokens: int, cache: PagedCache) -> Tensor:
    """[n + tokens - 1] int64: slots of a chunk's tokens and of those before them."""
    first = max(0, chunk.start - tokens + 1)
    absent = tokens - 1 - (chunk.start - first)
    slots = cache.slots((first, chunk.start + len(chunk.ids)), chunk.pages)
    return torch.tensor([cache.pad * cache.page_size] * absent + slots, dtype=torch.int64)


def _positions(chunk: Chunk) -> range:
    """Positions count from the sequence's start, not from the chunk's."""
    return range(chunk.start, chunk.start + len(chunk.ids))


def _wanted_rows(chunk: Chunk, first_row: int) -> range:
    """The rows whose logits a chunk asks for."""
    end = first_row + len(chunk.ids)
    return range(end - {"none": 0, "last": 1, "all": len(chunk.ids)}[chunk.logits], end)


def _groups(many: list[Chunk], ones: list[Chunk], cache: PagedCache) -> list[Group]:
    groups = [_prefill_group(chunk, cache) for chunk in many] + _decode_groups(ones, cache)
    row = 0
    for group in groups:
        group.first_row += row
        group.end_row += row
        row = group.end_row
    return groups


def _prefill_group(chunk: Chunk, cache: PagedCache) -> Group:
    end = chunk.start + len(chunk.ids)
    return _group([chunk.pages[: -(-end // cache.page_size)]], [end], len(chunk.ids), cache, decode=False)


def _decode_groups(chunks: list[Chunk], cache: PagedCache) -> list[Group]:
    groups: list[Group] = []
    tables: list[tuple[int, ...]] = []
    ends: list[int] = []
    for chunk in chunks:  # ascending length
        table = chunk.pages[: chunk.start // cache.page_size + 1]
        if tables and len(table) > max(len(tables[0]) * _SPREAD, len(tables[0]) + _SPREAD_PAGES):
            groups.append(_group(tables, ends, len(tables), cache, decode=True))
            tables, ends = [], []
        tables.append(table)
        ends.append(chunk.start + 1)
    if tables:
        groups.append(_group(tables, ends, len(tables), cache, decode=True))
    return groups


def _group(tables: list[tuple[int, ...]], ends: list[int], rows: int, cache: PagedCache, *, decode: bool) -> Group:
    longest = max(len(table) for table in tables)
    padded = [[*table, *[cache.pad] * (longest - len(table))] for table in tables]
    table = torch.tensor(padded, dtype=torch.int64, device=cache.storage.device)
    return Group(0, rows, cache.tables(table), len(tables), max(ends), decode)
