"""The page books: references, prefix index, eviction, and 10,000 random steps on eight pages."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from pdserve.engine import prefix as chains
from pdserve.engine.blocks import BlockManager, CachedPage
from pdserve.engine.prefix import Link, Prefix
from pdserve.errors import ConfigError, Exhausted, Internal

A, B = b"tenant-a", b"tenant-b"


def prefix(identity: bytes, ids: tuple[int, ...], page_size: int = 2) -> Prefix:
    return Prefix(identity, ids, page_size)


def test_allocate_release_and_counts() -> None:
    manager = BlockManager(4, 2)
    assert manager.allocate("r", 3) == (0, 1, 2)
    assert (manager.free_count, manager.held_count, manager.cached_count) == (1, 3, 0)
    assert manager.holdings() == {"r": (0, 1, 2)}
    with pytest.raises(Exhausted) as error:
        manager.allocate("s", 2)
    assert error.value.reason == "NO_PAGES" and manager.free_count == 1
    manager.release("r")
    manager.release("r")
    assert (manager.free_count, manager.held_count) == (4, 0)
    manager.check_integrity()


def test_published_prefix_is_found_shared_and_evicted_last_page_first() -> None:
    manager = BlockManager(4, 2)
    pages = manager.allocate("r", 3)
    manager.publish(prefix(A, (1, 2, 3, 4, 5)), pages)  # the third page is not full
    assert manager.match(prefix(A, (1, 2, 3, 4, 5, 6)), 6) == (pages[:2], 4)
    assert manager.match(prefix(A, (1, 2, 3, 4)), 3) == (pages[:1], 2)
    assert manager.match(prefix(A, (1, 2, 9, 4)), 4) == (pages[:1], 2)
    assert manager.match(prefix(B, (1, 2, 3, 4)), 4) == ((), 0)
    manager.retain("s", pages[:2])
    manager.release("r")
    assert (manager.held_count, manager.cached_count) == (2, 0)
    manager.release("s")
    assert (manager.held_count, manager.cached_count, manager.available_count) == (0, 2, 4)
    manager.allocate("t", 3)  # evicts one: the deeper page, the shallow one is still a prefix
    assert manager.match(prefix(A, (1, 2, 3, 4)), 4) == (pages[:1], 2)
    manager.check_integrity()


def test_evicting_a_page_forgets_what_hangs_below_it() -> None:
    manager = BlockManager(3, 1)
    first = manager.allocate("a", 1)
    manager.publish(prefix(A, (1,), 1), first)
    second = manager.allocate("b", 1)
    manager.publish(prefix(A, (1, 2), 1), first + second)
    manager.release("a")  # the parent is idle, the child still held
    manager.allocate("c", 2)
    assert manager.match(prefix(A, (1, 2), 1), 2) == ((), 0)
    manager.check_integrity()
    manager.release("b")
    assert (manager.held_count, manager.cached_count) == (2, 0)
    manager.check_integrity()


def test_content_is_compared_even_when_digests_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_chain", lambda parent, ids: b"same")
    monkeypatch.setattr(chains, "_root", lambda identity: b"root")
    manager = BlockManager(4, 2)
    manager.publish(prefix(A, (1, 2)), manager.allocate("r", 1))
    assert manager.match(prefix(A, (1, 2)), 2)[1] == 2
    assert manager.match(prefix(A, (1, 3)), 2) == ((), 0)
    assert manager.match(prefix(B, (1, 2)), 2) == ((), 0)
    manager.publish(prefix(B, (1, 2)), manager.allocate("s", 1))  # stays private
    assert manager.match(prefix(B, (1, 2)), 2) == ((), 0)


def test_misuse_is_an_internal_error() -> None:
    manager = BlockManager(2, 2)
    with pytest.raises(Internal):
        manager.retain("r", (0,))
    (page,) = manager.allocate("r", 1)
    manager.publish(prefix(A, (1, 2)), (page,))
    with pytest.raises(Internal):
        manager.publish(prefix(A, (3, 4)), (page,))
    manager.release("r")
    with pytest.raises(Internal):
        manager.publish(prefix(A, (5, 6)), (1,))
    with pytest.raises(ConfigError):
        BlockManager(0, 2)


def _plant(manager: BlockManager, fault: str) -> None:
    """Breaks one statement of the books; pages 0 and 1 are held, 2 is cached below nothing, 3 is free."""
    if fault == "page 0 has -1 references":
        manager._references[0] = -1
    elif fault == "page 0: 2 references, 1 owned":
        manager._references[0] = 2
    elif fault == "page 1: 1 references, 2 owned":
        manager._owners["s"] = Counter([1])
    elif fault == "listed as an owner of nothing":
        manager._owners["s"] = Counter()
    elif fault == "r is listed as an owner of nothing":
        manager._owners["r"][3] = 0
    elif fault == "a page is free twice":
        manager._free.append(3)
    elif fault == "there is no page 7":
        manager._free.append(7)
    elif fault == "page 1 is in 2 states":
        manager._free.append(1)
    elif fault == "page 3 is in 0 states":
        manager._free.remove(3)
    elif fault == "page 2 is free and findable":
        del manager._idle[2]
        manager._free.append(2)
    elif fault == "page 3 is kept for reuse, and nobody can find it":
        manager._free.remove(3)
        manager._idle[3] = None
    elif fault == "page 0 is indexed wrongly":
        manager._cached[0] = CachedPage(Link(b"k", b"p", A, b"12"), 0)
    elif fault == "page 2 does not match its key":
        _relink(manager, 2, content=b"other")
    elif fault == "page 2 hangs below a page that is gone":
        link = manager._cached[2].link
        _relink(manager, 2, parent=b"gone", key=chains._chain(b"gone", link.content))
    elif fault == "differ in number":
        manager._index[b"k"] = manager._cached[2]
    else:
        manager._children.clear()


def _relink(manager: BlockManager, page: int, **changes: bytes) -> None:
    old = manager._cached[page]
    new = CachedPage(replace(old.link, **changes), page)
    del manager._index[old.link.key]
    manager._index[new.link.key] = manager._cached[page] = new


@pytest.mark.parametrize(
    "fault",
    [
        "page 0 has -1 references",
        "page 0: 2 references, 1 owned",
        "page 1: 1 references, 2 owned",
        "listed as an owner of nothing",
        "r is listed as an owner of nothing",
        "a page is free twice",
        "there is no page 7",
        "page 1 is in 2 states",
        "page 3 is in 0 states",
        "page 2 is free and findable",
        "page 3 is kept for reuse, and nobody can find it",
        "page 0 is indexed wrongly",
        "page 2 does not match its key",
        "page 2 hangs below a page that is gone",
        "differ in number",
        "the tree of pages does not list every page",
    ],
)
def test_check_integrity_names_each_broken_statement(fault: str) -> None:
    manager = BlockManager(4, 2)
    pages = manager.allocate("r", 2)
    manager.publish(prefix(A, (1, 2)), pages)
    manager.publish(prefix(B, (5, 6)), manager.allocate("s", 1))
    manager.release("s")
    manager.check_integrity()
    _plant(manager, fault)
    with pytest.raises(Internal, match=fault) as error:
        manager.check_integrity()
    assert error.value.reason == "PAGE_BOOKS"


def test_what_would_be_left_beside_pages_that_are_retained() -> None:
    manager = BlockManager(4, 2)
    pages = manager.allocate("r", 2)
    manager.publish(prefix(A, (1, 2, 3, 4)), pages)
    assert manager.available_beside(pages) == manager.available_count == 2  # held already
    manager.release("r")
    assert (manager.available_count, manager.available_beside(pages), manager.available_beside(pages[:1])) == (4, 2, 3)


def test_ten_thousand_random_steps_on_eight_pages() -> None:
    draw, manager, size = random.Random(5), BlockManager(8, 2), 2
    contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # what a prefill would have written
    owners: dict[str, tuple[bytes, tuple[int, ...], tuple[int, ...]]] = {}
    hits = refusals = 0
    for step in range(10_000):
        identity, ids = draw.choice((A, B)), tuple(draw.randrange(2) for _ in range(draw.randrange(1, 9)))
        action = draw.random()
        if action < 0.45:
            owner = f"r{step}"
            found, tokens = manager.match(prefix(identity, ids), len(ids) - 1)
            for index, page in enumerate(found):
                assert contents[page] == (identity, ids[: (index + 1) * size])
            manager.retain(owner, found)
            try:
                new = manager.allocate(owner, manager.pages_for(len(ids)) - len(found))
            except Exhausted:
                refusals += 1
                manager.release(owner)
            else:
                hits += tokens > 0
                for index, page in enumerate(new, start=len(found)):
                    contents[page] = (identity, ids[: (index + 1) * size])
                owners[owner] = (identity, ids, found + new)
        elif owners:
            owner = draw.choice(list(owners))
            if action < 0.7:
                of, written, pages = owners[owner]
                manager.publish(prefix(of, written), pages)
            else:
                manager.release(owner)
                del owners[owner]
        manager.check_integrity()
        assert manager.held_count == len({page for _, _, pages in owners.values() for page in pages})
    assert hits > 200 and refusals > 200
    for owner in list(owners):
        manager.release(owner)
    assert manager.held_count == 0 and not manager.holdings()


def test_every_page_of_a_sequence_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is looked for, published, and published again with its output."""
    hashed: list[bytes] = []
    chain = chains._chain

    def counted(parent: bytes, content: bytes) -> bytes:
        hashed.append(content)
        return chain(parent, content)

    monkeypatch.setattr(chains, "_chain", counted)
    manager = BlockManager(600, 16)
    ids = tuple(range(8192))
    sequence = Prefix(A, ids, 16)
    assert manager.match(sequence, len(ids) - 1) == ((), 0)
    assert len(hashed) == 1  # nothing is there, so nothing after the first page is asked for
    pages = manager.allocate("r", 514)
    manager.publish(sequence, pages[:512])
    for _ in range(3):
        assert manager.match(sequence, len(ids)) == (pages[:512], len(ids))
    assert len(hashed) == 512
    sequence.extend(range(40))
    manager.publish(sequence, pages)
    assert len(hashed) == 514
    again = Prefix(A, (*ids, *range(40)), 16)
    assert manager.match(again, 8192 + 40) == (pages, 8192 + 32)


def test_changes_tell_when_a_request_may_fit_that_did_not() -> None:
    manager = BlockManager(4, 2)
    pages = manager.allocate("r", 3)
    before = manager.changes
    with pytest.raises(Exhausted):
        manager.allocate("s", 2)
    assert manager.changes == before
    manager.publish(prefix(A, (1, 2)), pages)
    assert manager.changes > before
    before = manager.changes
    manager.release("r")
    assert manager.changes > before
