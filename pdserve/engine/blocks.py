"""Who holds which page. Bookkeeping only: no torch, one thread (the worker's event loop).

A page is in one of three states:

    free      nobody references it, nothing findable is in it
    held      referenced by one or more owners (request, pin, grant); maybe also findable
    cached    findable through the prefix index, referenced by nobody; evictable

    free -- allocate --> held -- release --> cached (if published) or free
    cached -- retain --> held                cached -- evicted by allocate --> free

The prefix index is a tree of full pages, keyed by a chain of digests over identity and
token ids. A digest only finds a candidate: identity, ids and parent are compared on a hit.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache_transfer.contract import sha256
from pdserve.errors import ConfigError, Exhausted, Internal


@dataclass(frozen=True)
class CachedPage:
    """One full page of the prefix index."""

    key: bytes  # chain digest
    parent: bytes  # the key before it; for the first page the digest of the identity
    identity: bytes
    ids: tuple[int, ...]  # page_size of them
    page: int


class BlockManager:
    """Reference counts per owner, and a prefix index with least-recently-used eviction."""

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ConfigError(f"{pages} pages of {page_size} tokens", field="pages", remedy="use at least 1 of each")
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages))  # a heap: low numbers first keeps a sequence's pages neighbours
        self._references = [0] * pages
        self._owners: dict[str, Counter[int]] = {}
        self._index: dict[bytes, CachedPage] = {}
        self._cached: dict[int, CachedPage] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced cached pages, oldest first

    @property
    def free_count(self) -> int:
        """Pages with nothing in them."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Unreferenced pages kept for reuse."""
        return len(self._idle)

    @property
    def available_count(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def held_count(self) -> int:
        """Pages that somebody references."""
        return self.pages - self.available_count

    def holdings(self) -> Mapping[str, tuple[int, ...]]:
        """owner -> the pages it references."""
        return {owner: tuple(pages) for owner, pages in self._owners.items()}

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, owner: str, count: int) -> tuple[int, ...]:
        """`count` pages with one reference each by `owner`; idle cached pages are evicted first.

        Raises Exhausted, with nothing changed, if fewer are available.
        """
        if count < 0:
            raise Internal(f"{count} pages asked for", field="count")
        if count > self.available_count:
            raise Exhausted(
                f"{count} pages asked for, {self.available_count} of {self.pages} available",
                reason="NO_PAGES",
                field="pages",
                remedy="wait until running requests finish",
            )
        while len(self._free) < count:
            self._evict(next(iter(self._idle)))
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._take(owner, pages)
        return pages

    def match(self, identity: bytes, ids: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], int]:
        """The longest cached prefix in whole pages of at most `limit` tokens: (pages, tokens).

        Takes no reference: call `retain` before anything else can allocate.
        """
        pages: list[int] = []
        parent = _root(identity)
        for start in range(0, min(limit, len(ids)) // self.page_size * self.page_size, self.page_size):
            part = ids[start : start + self.page_size]
            found = self._index.get(_chain(parent, part))
            if found is None or not _same(found, parent, identity, part):
                break
            if found.page in self._idle:
                self._idle.move_to_end(found.page)
            pages.append(found.page)
            parent = found.key
        for page in reversed(pages):  # the deepest page is the first to go
            if page in self._idle:
                self._idle.move_to_end(page)
        return tuple(pages), len(pages) * self.page_size

    def retain(self, owner: str, pages: Iterable[int]) -> None:
        """One more reference by `owner` on each page. Raises Internal for a free page."""
        pages = tuple(pages)
        for page in pages:
            if not 0 <= page < self.pages or not (self._references[page] or page in self._idle):
                raise Internal(f"page {page} has nothing to retain", reason="PAGE_BOOKS", field="pages")
        self._take(owner, pages)

    def release(self, owner: str) -> None:
        """Drops every reference of `owner`. An owner without any is no error: release is idempotent."""
        held = self._owners.pop(owner, None)
        if held is None:
            return
        for page, count in reversed(held.items()):
            self._references[page] -= count
            if self._references[page] == 0:
                self._park(page)

    def publish(self, identity: bytes, ids: tuple[int, ...], pages: Iterable[int]) -> None:
        """Makes full pages findable: pages[i] holds ids[i * page_size : (i + 1) * page_size].

        Only verified content may be published, and only while an owner references it. A
        page whose content is already findable elsewhere stays private.
        """
        parent = _root(identity)
        for start, page in zip(range(0, len(ids) - self.page_size + 1, self.page_size), pages, strict=False):
            part = ids[start : start + self.page_size]
            key = _chain(parent, part)
            known = self._index.get(key)
            if known is not None and not _same(known, parent, identity, part):
                return  # a digest collision: leave the page private
            if known is None:
                self._add(CachedPage(key, parent, identity, part, page))
            parent = key

    def check_integrity(self) -> None:
        """Raises Internal for the first statement about the books that does not hold."""
        counted: Counter[int] = Counter()
        for held in self._owners.values():
            counted.update(held)
        free = set(self._free)
        _require(len(free) == len(self._free), "a page is free twice")
        for page in range(self.pages):
            references = self._references[page]
            _require(references >= 0, f"page {page} has {references} references")
            _require(references == counted[page], f"page {page}: {references} references, {counted[page]} owned")
            states = (page in free) + (references > 0) + (page in self._idle)
            _require(states == 1, f"page {page} is in {states} states at once")
            _require(not (page in free and page in self._cached), f"page {page} is free and findable")
        for page, entry in self._cached.items():
            _require(entry.page == page and self._index.get(entry.key) is entry, f"page {page} is indexed wrongly")
            _require(entry.key == _chain(entry.parent, entry.ids), f"page {page} does not match its key")
            known = entry.parent == _root(entry.identity) or entry.parent in self._index
            _require(known, f"page {page} hangs below a page that is gone")
        _require(len(self._index) == len(self._cached), "the index and the cached pages differ in number")

    def _add(self, entry: CachedPage) -> None:
        if entry.page in self._cached:
            raise Internal(f"page {entry.page} is published already, with other content", field="pages")
        if self._references[entry.page] == 0:
            raise Internal(f"page {entry.page} is published by nobody who holds it", field="pages")
        self._index[entry.key] = entry
        self._cached[entry.page] = entry
        self._children.setdefault(entry.parent, set()).add(entry.key)

    def _take(self, owner: str, pages: tuple[int, ...]) -> None:
        held = self._owners.setdefault(owner, Counter()) if pages else Counter()
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)
            held[page] += 1

    def _park(self, page: int) -> None:
        """An unreferenced page becomes cached if it is findable, else free."""
        if page in self._cached:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def _evict(self, page: int) -> None:
        """Forgets a page and whatever hangs below it; unreferenced ones become free."""
        doomed = [self._cached[page].key]
        while doomed:
            entry = self._index.pop(doomed.pop())
            doomed.extend(self._children.pop(entry.key, ()))
            siblings = self._children.get(entry.parent)
            if siblings is not None:
                siblings.discard(entry.key)
                if not siblings:
                    del self._children[entry.parent]
            del self._cached[entry.page]
            self._idle.pop(entry.page, None)
            if self._references[entry.page] == 0:
                heapq.heappush(self._free, entry.page)


def _root(identity: bytes) -> bytes:
    return sha256("prefix-root", identity)


def _chain(parent: bytes, ids: tuple[int, ...]) -> bytes:
    return sha256("prefix-page", (parent, ids))


def _same(entry: CachedPage, parent: bytes, identity: bytes, ids: tuple[int, ...]) -> bool:
    """What a digest found is what was looked for: the comparison after the hit (contract A9)."""
    return (entry.parent, entry.identity, entry.ids) == (parent, identity, ids)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Internal(otherwise, reason="PAGE_BOOKS", field="blocks")
