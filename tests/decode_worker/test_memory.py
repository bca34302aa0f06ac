"""Who gets pages and who loses them, without an engine: growth, watermark, pins, grants."""

from __future__ import annotations

import pytest

from decode_worker.sequence import Sequence, State
from decode_worker.settings import DecodeSettings
from pdserve.errors import ConfigError, Refused
from tests.decode_worker.pool import Pool, grown_until_stuck, memory
from tests.engine.tiny import prompt


def test_a_grant_leaves_the_watermark_unless_nobody_else_holds_pages() -> None:
    pool = Pool(pages=10, growth_watermark=0.2)
    a = pool.sequence("a", prompt(35), 4)  # nine pages: alone, so the watermark is no reason to wait
    b, c = pool.sequence("b", prompt(3), 4), pool.sequence("c", prompt(3, seed=1), 4)
    pool.open(b)
    pool.open(a)
    assert pool.granted == ["b"]
    pool.open(c)  # would fit, but a is before it
    assert pool.granted == ["b"]
    pool.scheduler.leave(b, State.ABORTED, Refused("gone"))
    assert pool.granted == ["b", "a"] and pool.blocks.available_count == 1
    pool.scheduler.leave(a, State.ABORTED, Refused("gone"))
    assert pool.granted == ["b", "a", "c"]


def test_caches_in_transfer_count_with_what_they_hold_and_their_first_growth() -> None:
    pool = Pool(pages=10, growth_watermark=0.2)
    for n in range(8):
        pool.open(pool.sequence(f"s{n}", prompt(4, seed=n), 8))  # one full page each, and one to grow into
    assert pool.granted == ["s0", "s1", "s2", "s3"]
    assert pool.blocks.available_count == 2


def test_preempted_ones_come_before_open_pushes() -> None:
    pool = Pool(pages=8)
    a, b = pool.start("a", prompt(14), 4), pool.start("b", prompt(13, seed=1), 4)
    new = pool.sequence("new", prompt(3, seed=2), 2)
    memory(pool).preempt(b)
    pool.blocks.allocate("x", 1)
    pool.open(new)  # three pages are free, and b needs four
    assert pool.granted == ["a", "b"]
    pool.step()
    assert pool.granted == ["a", "b"] and b.state is State.PREEMPTED
    pool.scheduler.leave(a, State.ABORTED, Refused("gone"))
    assert str(b.state) == "verified" and pool.granted == ["a", "b", "new"]
    pool.blocks.release("x")
    pool.scheduler.leave(new, State.ABORTED, Refused("gone"))
    pool.finish()


def test_one_whose_reader_is_slow_waits_for_nobody_and_holds_nobody_back() -> None:
    pool = Pool(pages=6)
    a, b = pool.start("a", prompt(10), 12), pool.start("b", prompt(7, seed=1), 12)
    for _ in range(3):
        pool.step()
    a.stream._unread, a.stream.full_since = 4, 1.0
    while b.state is not State.DONE:
        pool.read(b)
        assert pool.step() == ["b"]  # at the cost of an older one, which would not use its pages now
    assert a.state is State.PREEMPTED
    new = pool.sequence("new", prompt(18, seed=2), 2)
    pool.open(new)
    assert new.state is State.GRANTED  # a holds nobody back while nobody reads it
    pool.scheduler.leave(new, State.ABORTED, Refused("gone"))
    pool.finish()
    assert a.generation.output == pool.expected(prompt(10), 12)


def test_the_younger_one_waits_for_a_page_and_loses_its_own_only_when_an_older_one_needs_it() -> None:
    pool = Pool(pages=4)
    a, b = pool.start("a", prompt(5), 8), pool.start("b", prompt(7, seed=1), 8)
    turns = []
    while b.state is not State.PREEMPTED:
        pool.read()
        turns.append(pool.step())
    assert turns == [["a", "b"]] * 2 + [["a"]] * 3  # b stands still with nine tokens, a goes on, and then needs a page
    assert a.cached == 9 and len(a.pages) == 3
    pool.finish()
    assert b.generation.output == pool.expected(prompt(7, seed=1), 8)


def test_of_several_the_youngest_goes_first() -> None:
    pool = Pool(pages=6)
    a, b, c = (pool.start(key, prompt(n, seed=n), 8) for key, n in (("a", 7), ("b", 5), ("c", 4)))
    while not pool.scheduler.counters.preemptions:
        pool.read()
        pool.step()
    assert [s.state for s in (a, b, c)] == [State.DECODING, State.DECODING, State.PREEMPTED]
    pool.finish()


def stepped_back(pool: Pool, sequence: Sequence) -> None:
    for _ in range(100):
        if sequence.state is State.PREEMPTED:
            return
        pool.read()
        pool.step()
    raise AssertionError(f"stalled: {sequence}")


def test_one_that_cannot_grow_because_of_pins_alone_steps_back_for_others() -> None:
    """Else it would wait for those the pins belong to, and they for it, or at prefill for others who wait for it."""
    pool = Pool(pages=8)
    pool.start("old", prompt(5), 4)
    pool.finish()
    waiting = pool.sequence("waiting", (*prompt(5), 1), 2)
    assert len(waiting.held) == 1
    a = pool.start("a", prompt(9, seed=1), 24)  # eight pages in the end
    stepped_back(pool, a)
    assert a.length == 29 and pool.blocks.held_count == 1
    late = pool.sequence("late", (*prompt(5), 2), 2)
    assert late.held == ()  # no more pins while somebody lacks pages
    assert pool.step() == [] and str(a.state) == "preempted"
    pool.open(late)
    pool.open(waiting)
    assert (late.state, waiting.state) == (State.GRANTED, State.WAITING)  # one at a time
    pool.verify(late)
    while late.state is not State.DONE:
        pool.step()
    assert str(waiting.state) == "granted"
    pool.verify(waiting)
    pool.finish()
    assert waiting.generation.output == pool.expected((*prompt(5), 1), 2)
    assert a.generation.output == pool.expected(prompt(9, seed=1), 24)
    assert pool.scheduler.counters.preemptions == 1 and pool.scheduler.recomputed_tokens < 28


def test_one_that_steps_back_from_a_pin_of_its_own_content_goes_on_with_that() -> None:
    pool = Pool(pages=10)
    ids = prompt(16)
    first, a = (pool.sequence(key, ids, 20) for key in ("first", "a"))
    for sequence in (first, a):
        pool.open(sequence)
    for sequence in (first, a):  # both caches come whole: one is found, the other is private
        pool.verify(sequence)
    pinned = pool.sequence("pinned", (*ids, 1), 2)
    assert set(pinned.held) < set(first.pages) and not set(pinned.held) & set(a.pages)
    pool.scheduler.leave(first, State.ABORTED, Refused("gone"))
    pool.finish()  # nothing else comes: a stall would be one for good
    assert a.generation.output == pool.expected(ids, 20)
    pool.scheduler.leave(pinned, State.EXPIRED, Refused("late"))


def test_no_pin_is_added_beside_which_one_that_waits_would_not_fit() -> None:
    pool = Pool(pages=8)
    pool.start("a", prompt(9), 2)
    pool.start("b", prompt(9, seed=1), 2)
    pool.finish()
    large = pool.sequence("large", (*prompt(9), *prompt(13, seed=2)), 9)  # six pages, two of them held
    other = pool.sequence("other", (*prompt(9, seed=1), 1), 2)
    assert (len(large.held), len(other.held)) == (2, 2)  # all eight are needed: both fit, one after the other
    whole = pool.sequence("whole", prompt(28, seed=3), 5)
    third = pool.sequence("third", (*prompt(9), 1), 2)
    assert whole.held == third.held == ()  # although it would pin only what is pinned already
    for sequence in (large, other, whole, third):
        pool.scheduler.leave(sequence, State.ABORTED, Refused("gone"))


def test_a_page_that_comes_back_goes_to_one_that_cannot_grow_and_only_then_to_an_open_push() -> None:
    pool = Pool(pages=8)
    a, coming = pool.start("a", prompt(9, seed=1), 22), pool.sequence("coming", prompt(7), 2)
    pool.open(coming)
    grown_until_stuck(pool, a)
    new = pool.sequence("new", prompt(2), 2)
    pool.open(new)
    pool.scheduler.leave(coming, State.EXPIRED, Refused("late"))
    assert new.state is State.WAITING and pool.blocks.available_count == 2
    pool.read()
    assert pool.step() == ["a"] and len(a.pages) == 7
    assert str(new.state) == "granted"  # by the same plan: nothing else might come that asks again
    pool.scheduler.leave(new, State.ABORTED, Refused("gone"))
    pool.finish()


def test_pins_in_the_way_of_an_older_one_do_not_keep_the_younger() -> None:
    pool = Pool(pages=8)
    a, b = pool.start("a", prompt(20, seed=1), 6), pool.start("b", prompt(3, seed=2), 6)
    for sequence in (a, b):
        memory(pool).preempt(sequence)
        sequence.stream._unread, sequence.stream.full_since = 4, 1.0
    old = pool.start("old", prompt(13), 4)
    while old.state is not State.DONE:
        pool.read(old)
        pool.step()
    pinned = pool.sequence("pinned", (*prompt(13), 1), 2)
    assert len(pinned.held) == 3
    pool.read()
    assert pool.step() == ["b"] and a.state is State.PREEMPTED
    pool.scheduler.leave(pinned, State.EXPIRED, Refused("late"))
    pool.finish()


def test_pins_in_the_way_of_one_that_was_preempted_are_used_up() -> None:
    pool = Pool(pages=8)
    pool.start("old", prompt(13), 4)
    pool.finish()
    a = pool.start("a", prompt(9, seed=1), 24)
    for _ in range(12):
        pool.read()
        pool.step()
    memory(pool).preempt(a)
    a.stream._unread, a.stream.full_since = 4, 1.0  # so that a pin can come meanwhile
    pinned = pool.sequence("pinned", (*prompt(13), 1), 2)
    assert len(pinned.held) == 3
    pool.read(a)
    assert pool.step() == [] and a.state is State.PREEMPTED  # six pages are needed
    small = pool.sequence("small", (*prompt(13), 2), 2)
    assert small.held == ()
    pool.open(pinned)
    assert pinned.state is State.GRANTED  # nobody holds anything but pins: else both would wait for its expiry
    pool.open(small)
    assert small.state is State.WAITING  # one at a time: a is before it
    pool.verify(pinned)
    pool.finish()
    pool.scheduler.leave(small, State.ABORTED, Refused("gone"))
    assert str(pinned.state) == "done" and a.generation.output == pool.expected(prompt(9, seed=1), 24)


def test_a_first_growth_is_no_more_than_the_answer() -> None:
    pool = Pool(pages=2)
    one = pool.sequence("one", prompt(8), 1)
    assert one.logits_only and one.cache_tokens == 0
    whole = pool.start("whole", prompt(7), 2)  # eight tokens: the pool
    pool.finish()
    assert whole.generation.output == pool.expected(prompt(7), 2)
    pool.scheduler.leave(one, State.ABORTED, Refused("gone"))


def test_many_that_wait_for_prefill_hold_no_page() -> None:
    blocks = Pool(pages=16, max_queue=50)
    for n in range(50):
        blocks.sequence(f"s{n}", prompt(20, seed=n), 20)
    assert blocks.blocks.held_count == 0 and not blocks.blocks.holdings()


@pytest.mark.parametrize(
    ("name", "value"), [("growth_watermark", -0.1), ("growth_watermark", 1.0), ("growth_watermark", float("nan"))]
)
def test_the_watermark_is_a_share(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeSettings(**{name: value}).check()  # type: ignore[arg-type]
    assert caught.value.field == f"decode.{name}"
