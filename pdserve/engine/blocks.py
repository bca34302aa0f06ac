"""Who holds which page. Bookkeeping only: no torch, one thread (the worker's event loop).

A page is in one of three states:

    free      nobody references it, nothing findable is in it
    held      referenced by one or more owners (request, pin, grant); maybe also findable
    cached    findable through the prefix index, referenced by nobody; evictable

    free -- allocate --> held -- release, drop --> cached (if published) or free
    cached -- retain --> held                cached -- evicted by allocate --> free

The prefix index is a tree of full pages, keyed by a chain of digests (prefix.py). A digest
only finds a candidate: identity, ids and parent are compared on a hit.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.engine.prefix import Link, Prefix, key_of, root_of, same
from pdserve.errors import ConfigError, Exhausted, Internal


@dataclass(frozen=True, slots=True)
class CachedPage:
    """One page of the prefix index."""

    link: Link
    page: int


class BlockManager:
    """Reference counts per owner, and a prefix index with least-recently-used eviction."""

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ConfigError(f"{pages} pages of {page_size} tokens", field="pages", remedy="use at least 1 of each")
        self.pages = pages
        self.page_size = page_size
        self.changes = 0
        """Rises whenever pages became available or findable: before, a request that did not fit still does not."""
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

    def available_beside(self, pages: Iterable[int]) -> int:
        """Pages that `allocate` could hand out once these had been retained."""
        return self.available_count - sum(page in self._idle for page in set(pages))

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

    def match(self, prefix: Prefix, limit: int) -> tuple[tuple[int, ...], int]:
        """The longest cached prefix in whole pages of at most `limit` tokens: (pages, tokens).

        Takes no reference: call `retain` before anything else can allocate.
        """
        pages: list[int] = []
        for link in prefix.links(limit // self.page_size):
            found = self._index.get(link.key)
            if found is None or not same(found.link, link):
                break
            pages.append(found.page)
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

    def references(self, page: int) -> int:
        """How often it is held; whoever writes a page must be its only holder."""
        return self._references[page]

    def drop(self, owner: str, page: int) -> None:
        """One reference of `owner` on a page less. Raises Internal if it has none."""
        held = self._owners.get(owner, Counter())
        if not held[page]:
            raise Internal(f"{owner} does not hold page {page}", reason="PAGE_BOOKS", field="pages")
        held[page] -= 1
        if not held[page]:
            del held[page]
        if not held:
            del self._owners[owner]
        self._references[page] -= 1
        if self._references[page] == 0:
            self._park(page)

    def release(self, owner: str) -> None:
        """Drops every reference of `owner`. An owner without any is no error: release is idempotent."""
        held = self._owners.pop(owner, None)
        if held is None:
            return
        for page, count in reversed(held.items()):
            self._references[page] -= count
            if self._references[page] == 0:
                self._park(page)

    def publish(self, prefix: Prefix, pages: Sequence[int]) -> None:
        """Makes full pages findable: pages[i] holds the tokens of the prefix's i-th page.

        Only verified content may be published, and only while an owner references it. A
        page whose content is already findable elsewhere stays private.
        """
        for link, page in zip(prefix.links(len(pages)), pages, strict=False):
            known = self._index.get(link.key)
            if known is None:
                self._add(CachedPage(link, page))
            elif not same(known.link, link):
                return  # a digest collision: leave the page private

    def check_integrity(self) -> None:
        """Raises Internal for the first statement about the books that does not hold."""
        self._check_references()
        self._check_index()

    def _check_references(self) -> None:
        """Every page is free, held or cached, and held as often as its owners say."""
        counted: Counter[int] = Counter()
        for owner, held in self._owners.items():
            if not held or min(held.values()) < 1:
                raise _broken(f"{owner} is listed as an owner of nothing")
            counted.update(held)
        free = set(self._free)
        if len(free) != len(self._free):
            raise _broken("a page is free twice")
        known = range(self.pages)
        for page in (*free, *counted, *self._idle, *self._cached):
            if page not in known:
                raise _broken(f"there is no page {page}")
        for page, references in enumerate(self._references):
            if references < 0:
                raise _broken(f"page {page} has {references} references")
            if references != counted[page]:
                raise _broken(f"page {page}: {references} references, {counted[page]} owned")
            states = (page in free) + (references > 0) + (page in self._idle)
            if states != 1:
                raise _broken(f"page {page} is in {states} states at once")
            if page in free and page in self._cached:
                raise _broken(f"page {page} is free and findable")
            if page in self._idle and page not in self._cached:
                raise _broken(f"page {page} is kept for reuse, and nobody can find it")

    def _check_index(self) -> None:
        """What can be found is under its own key, and below pages that can be found too."""
        roots = {identity: root_of(identity) for identity in {entry.link.identity for entry in self._cached.values()}}
        children: dict[bytes, set[bytes]] = {}
        for page, entry in self._cached.items():
            link = entry.link
            if entry.page != page or self._index.get(link.key) is not entry:
                raise _broken(f"page {page} is indexed wrongly")
            if link.key != key_of(link):
                raise _broken(f"page {page} does not match its key")
            if link.parent != roots[link.identity] and link.parent not in self._index:
                raise _broken(f"page {page} hangs below a page that is gone")
            children.setdefault(link.parent, set()).add(link.key)
        if len(self._index) != len(self._cached):
            raise _broken("the index and the cached pages differ in number")
        if children != self._children:
            raise _broken("the tree of pages does not list every page below its parent")

    def _add(self, entry: CachedPage) -> None:
        link = entry.link
        if entry.page in self._cached:
            raise Internal(f"page {entry.page} is published already, with other content", field="pages")
        if self._references[entry.page] == 0:
            raise Internal(f"page {entry.page} is published by nobody who holds it", field="pages")
        self._index[link.key] = entry
        self._cached[entry.page] = entry
        self._children.setdefault(link.parent, set()).add(link.key)
        self.changes += 1

    def _take(self, owner: str, pages: tuple[int, ...]) -> None:
        held = self._owners.setdefault(owner, Counter()) if pages else Counter()
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)
            held[page] += 1

    def _park(self, page: int) -> None:
        """An unreferenced page becomes cached if it is findable, else free."""
        self.changes += 1
        if page in self._cached:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def _evict(self, page: int) -> None:
        """Forgets a page and whatever hangs below it; unreferenced ones become free."""
        doomed = [self._cached[page].link.key]
        while doomed:
            entry = self._index.pop(doomed.pop())
            parent = entry.link.parent
            doomed.extend(self._children.pop(entry.link.key, ()))
            siblings = self._children.get(parent)
            if siblings is not None:
                siblings.discard(entry.link.key)
                if not siblings:
                    del self._children[parent]
            del self._cached[entry.page]
            self._idle.pop(entry.page, None)
            if self._references[entry.page] == 0:
                heapq.heappush(self._free, entry.page)


def _broken(otherwise: str) -> Internal:
    return Internal(otherwise, reason="PAGE_BOOKS", field="blocks")
