"""Sequences that lost their pages and compute their tokens again, without an engine."""

from __future__ import annotations

from decode_worker.sequence import State
from pdserve.errors import Refused
from tests.decode_worker.pool import Pool, forget_cached, memory
from tests.engine.tiny import prompt


def test_when_no_page_is_left_the_youngest_loses_its_own_and_ends_up_with_the_same_output() -> None:
    pool = Pool(pages=6)
    a, b = pool.start("a", prompt(7), 14), pool.start("b", prompt(7, seed=1), 14)  # five pages each in the end
    while a.state is not State.DONE:
        pool.read()
        got = pool.step()
        assert "a" in got  # the oldest never waits
        if b.state is State.PREEMPTED:
            assert b.pages == b.held == () and b.cached == 0 and b.key not in pool.blocks.holdings()
    assert pool.scheduler.counters.preemptions == 1
    pool.finish()
    assert a.generation.output == pool.expected(prompt(7), 14)
    assert b.generation.output == pool.expected(prompt(7, seed=1), 14)
    assert 0 < pool.scheduler.recomputed_tokens < 20
    assert pool.blocks.held_count == 0


def test_what_was_preempted_stays_findable_until_it_is_needed() -> None:
    pool = Pool(pages=16)
    a = pool.start("a", prompt(7), 14)
    for _ in range(7):  # 13 tokens cached: three full pages
        pool.read()
        pool.step()
    memory(pool).preempt(a)
    assert (pool.blocks.held_count, pool.blocks.cached_count, a.cached) == (0, 3, 0)
    pool.read()
    assert pool.step() == ["a"]  # room was there: found again, and only the rest is computed
    assert pool.scheduler.recomputed_tokens == 1
    pool.finish()
    assert a.generation.output == pool.expected(prompt(7), 14)


def test_recomputation_is_chunked_beside_the_tokens_of_others() -> None:
    pool = Pool(pages=32, recompute_tokens=5)
    a, b = pool.start("a", prompt(9), 20), pool.start("b", prompt(18, seed=1), 20)
    for _ in range(4):
        pool.step()
    pool.read()
    memory(pool).preempt(b)
    forget_cached(pool)
    turns: list[list[str]] = []
    while not turns or "b" not in turns[-1]:
        pool.read()
        plan_before = b.cached
        turns.append(pool.step())
        assert b.cached - plan_before <= 5
    assert turns == [["a"]] * 4 + [["a", "b"]]  # 21 tokens were cached: four chunks, then the last with the new one
    assert pool.scheduler.recomputed_tokens == 21
    pool.finish()
    assert a.generation.output == pool.expected(prompt(9), 20)
    assert b.generation.output == pool.expected(prompt(18, seed=1), 20)


def test_one_preempted_before_its_first_token_keeps_the_logits() -> None:
    pool = Pool(pages=16)
    a = pool.start("a", prompt(9), 6)
    memory(pool).preempt(a)
    forget_cached(pool)
    assert a.state is State.PREEMPTED and a.first is not None
    assert pool.step() == ["a"] and a.generation.output == pool.expected(prompt(9), 1)
    assert pool.scheduler.recomputed_tokens == 0  # from the logits, before anything was computed again
    pool.finish()
    assert a.generation.output == pool.expected(prompt(9), 6)
    assert pool.scheduler.recomputed_tokens == 9


def test_preempted_twice_once_in_the_middle_of_recomputing() -> None:
    pool = Pool(pages=16, recompute_tokens=4)
    a = pool.start("a", prompt(15), 20)
    for _ in range(4):
        pool.step()
    pool.read()
    memory(pool).preempt(a)
    forget_cached(pool)
    pool.step()
    pool.step()
    assert a.cached == 8 < a.length and a.state is State.DECODING
    memory(pool).preempt(a)
    assert pool.blocks.cached_count == 2  # what was computed again is findable again
    pool.finish()
    assert a.generation.output == pool.expected(prompt(15), 20)
    assert pool.scheduler.counters.preemptions == 2


def test_the_last_token_is_computed_even_if_another_sequence_left_a_page_with_it() -> None:
    pool = Pool(pages=16)
    a, twin = pool.start("a", prompt(7), 12), pool.start("twin", prompt(7), 30)
    while a.length != 16:
        pool.read()
        pool.step()
    pool.scheduler.leave(twin, State.ABORTED, Refused("gone"))
    again = pool.start("again", tuple(a.tokens(0, 16)), 2)  # all four pages are findable now
    memory(pool).preempt(a)
    pool.read()
    assert pool.step() == ["again"]  # its logits came with it
    pool.read()
    assert "a" in pool.step() and pool.scheduler.recomputed_tokens == 3
    pool.finish()
    assert a.generation.output == pool.expected(prompt(7), 12)
    assert again.generation.output == pool.expected(a.tokens(0, 16), 2)


def test_one_budget_for_all_that_compute_again() -> None:
    pool = Pool(pages=32, recompute_tokens=5)
    sequences = [pool.start(key, prompt(9, seed=n), 8) for n, key in enumerate("abc")]
    for _ in range(3):
        pool.step()
    pool.read()
    for sequence in sequences:
        memory(pool).preempt(sequence)
    forget_cached(pool)
    while any(s.state is not State.DONE for s in sequences):
        before = pool.scheduler.recomputed_tokens
        pool.read()
        pool.step()
        assert pool.scheduler.recomputed_tokens - before <= 5
    for n, sequence in enumerate(sequences):
        assert sequence.generation.output == pool.expected(prompt(9, seed=n), 8)
