"""The scheduler and the prefix index: what is found, what never is, and who waits for pages beside it."""

from __future__ import annotations

import pytest

from pdserve.engine.blocks import BlockManager
from pdserve.engine.prefix import Prefix
from prefill_worker.scheduler import State
from tests.prefill_worker.scheduling import book, empty, made, scheduler, sizes


def test_a_long_prompt_that_is_mostly_cached_is_a_short_one() -> None:
    s = scheduler()
    known = made("known", 32)
    s.submit(known)
    s.admit(0.0)
    book(s), book(s)
    s.release(known, State.RELEASED)
    middle, again = made("middle", 20, first=100), made("again", 35)
    s.submit(middle)
    s.submit(again)
    assert (again.remaining, s.queued_tokens) == (3, 23)
    assert s.admit(0.0) == [middle, again]
    assert sizes(s) == {"middle": 8, "again": 3}  # filled up to 8, and 3 more by reserve
    for prompt in (middle, again):
        s.release(prompt, State.ABORTED)
    empty(s)


def test_two_that_lack_pages_beside_a_cached_prefix_are_each_looked_up_once() -> None:
    s = scheduler(pages=6)
    known = made("known", 8)
    s.submit(known)
    s.admit(0.0)
    book(s)
    s.release(known, State.RELEASED)
    holder = made("holder", 12, first=50)
    s.submit(holder)
    assert s.admit(0.0) == [holder]
    two = [made("a", 20), made("b", 21)]  # two cached pages and at least three more each, one is free
    for prompt in two:
        s.submit(prompt)
    assert s.admit(0.0) == []
    for prompt in (holder, *two):
        s.release(prompt, State.ABORTED)
    empty(s)


def test_a_prefix_is_found_again_but_never_the_last_token() -> None:
    s = scheduler()
    for owner, length, cached in (("a", 16, 0), ("b", 16, 12), ("c", 17, 16), ("d", 3, 0)):
        prompt = made(owner, length)
        s.submit(prompt)
        s.admit(0.0)
        assert (prompt.cached, prompt.done) == (cached, cached), owner
        assert book(s).chunks[0].start == cached
        book(s)
        s.release(prompt, State.RELEASED)
    empty(s)


def test_what_was_never_computed_is_never_found() -> None:
    s = scheduler()
    prompt = made("a", 32)
    s.submit(prompt)
    s.admit(0.0)
    s.apply(*s.plan())
    s.drop(prompt)
    assert s.plan()[1] == []
    s.release(prompt, State.ABORTED)
    again = made("b", 32)
    s.submit(again)
    s.admit(0.0)
    assert again.cached == 0
    s.release(again, State.ABORTED)
    empty(s)


def test_a_step_that_ends_after_the_prompt_was_dropped_commits_nothing() -> None:
    s = scheduler()
    prompt = made("a", 8)
    s.submit(prompt)
    s.admit(0.0)
    plan, prompts = s.plan()
    s.drop(prompt)
    assert s.apply(plan, prompts) == [] and prompt.state is State.RUNNING
    s.release(prompt, State.EXPIRED)
    assert s.blocks.cached_count == 0
    empty(s)


def test_a_prompt_that_fails_its_check_is_never_found() -> None:
    s = scheduler()
    prompt = made("a", 8)
    s.submit(prompt)
    s.admit(0.0)
    assert s.apply(*s.plan()) == [prompt]
    s.release(prompt, State.FAILED)  # not committed: its logits were not sound
    assert s.blocks.cached_count == 0
    again = made("b", 8)
    s.submit(again)
    s.admit(0.0)
    assert again.cached == 0
    s.release(again, State.ABORTED)
    empty(s)


def test_the_head_of_the_queue_is_looked_up_again_only_when_pages_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(pages=6)
    first, head = made("first", 12), made("head", 20, first=50)
    s.submit(first)
    assert s.admit(0.0) == [first]
    s.submit(head)
    book(s)  # first has nothing left to compute, so that head would have the next step
    lookups: list[int] = []
    match = BlockManager.match

    def counted(self: BlockManager, prefix: Prefix, limit: int) -> tuple[tuple[int, ...], int]:
        lookups.append(limit)
        return match(self, prefix, limit)

    monkeypatch.setattr(BlockManager, "match", counted)
    for _ in range(50):
        assert s.admit(0.0) == []
    assert len(lookups) == 1
    s.release(first, State.ABORTED)
    assert s.admit(0.0) == [head] and len(lookups) == 2
    s.release(head, State.ABORTED)
    empty(s)
