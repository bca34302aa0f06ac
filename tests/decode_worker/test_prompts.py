"""Prompts that a decode worker computes itself, without an engine: chunk sizes, order, pages."""

from __future__ import annotations

import pytest

from decode_worker.prompts import LEAST_TOKENS, Prompts
from decode_worker.sequence import Sequence, State
from pdserve.engine.rate import StepCost, pairs
from tests.decode_worker.pool import Pool, forget_cached, memory
from tests.decode_worker.test_scheduler import Bench
from tests.engine.tiny import prompt

FIXED_S, TOKEN_S, PAIR_S = 0.02, 0.002, 1e-6  # a machine


def seconds(spans: list[tuple[int, int]]) -> float:
    tokens = sum(count for _, count in spans)
    return FIXED_S + TOKEN_S * tokens + PAIR_S * sum(pairs(start, count) for start, count in spans)


def learned() -> StepCost:
    """What that machine's steps cost, as a worker finds out."""
    cost = StepCost()
    for n in range(200):
        spans = [(40 + n, 1)] * (1 + n % 6) + ([(n % 40 * 50, 8 + n % 60)] if n % 2 else [])
        cost.observe(spans, seconds(spans))
    return cost


def here(bench: Bench, key: str, ids: tuple[int, ...], output: int, tenant: str = "t") -> Sequence:
    """One whose prompt is to be computed here."""
    sequence = bench.sequence(key, ids, output, tenant)
    bench.scheduler.compute_here(sequence, len(ids) + output - 1, lambda: bench.granted.append(key))
    return sequence


def chunks(bench: Pool) -> dict[str, int]:
    """Tokens per sequence of the next step, which runs."""
    before = {s.key: s.cached for s in bench.scheduler.running}
    known = list(bench.scheduler.running)
    bench.step()
    return {s.key: s.cached - before[s.key] for s in known if s.cached > before[s.key]}


@pytest.mark.parametrize("step_s", [0.07, 0.1, 0.3])
def test_a_step_with_streams_ends_within_its_limit_and_is_as_large_as_that_allows(step_s: float) -> None:
    prompts = Prompts(chunk_tokens=256, step_s=step_s, cost=learned())
    pool = Pool(pages=400, prompts=prompts)
    for n in range(3):
        pool.start(f"s{n}", prompt(20, seed=n), 200)
    pool.step()  # their first tokens, whose logits came
    here(pool, "p", prompt(900), 4)
    sizes = []
    for _ in range(5):
        spans = [(s.cached, 1) for s in pool.scheduler.running[:3]]
        start = pool.scheduler.running[3].cached
        pool.read()
        took = chunks(pool)
        sizes.append(took.pop("p"))
        assert set(took.values()) == {1} and len(took) == 3
        larger = seconds([*spans, (start, int(1.1 * sizes[-1]) + 1)])
        assert seconds([*spans, (start, sizes[-1])]) <= 1.02 * step_s <= larger
    assert sizes == sorted(sizes, reverse=True)  # further into the prompt a token costs more


def test_without_streams_a_step_is_as_large_as_it_may_be_and_with_slow_ones_it_goes_on_all_the_same() -> None:
    prompts = Prompts(chunk_tokens=256, step_s=0.021, cost=learned())  # no step is so short
    pool = Pool(pages=400, prompts=prompts)
    alone = here(pool, "p", prompt(600), 4)
    assert [chunks(pool), chunks(pool)] == [{"p": 256}, {"p": 256}]
    pool.start("s", prompt(20, seed=1), 200)
    assert pool.step() == ["s"] and alone.cached == 512  # its first token is here: nothing to compute for it
    pool.read()
    assert chunks(pool) == {"p": LEAST_TOKENS, "s": 1}
    pool.finish()
    assert pool.blocks.held_count == 0


def test_a_prompt_that_would_be_late_behind_a_shorter_one_goes_first() -> None:
    """600 tokens take 1.5 s on this machine, and 300 others before them two thirds of a second."""
    prompts = Prompts(chunk_tokens=200, step_s=0.0, cost=learned(), clock=lambda: 50.0)
    pool = Pool(pages=400, prompts=prompts)
    pressed, shorter = here(pool, "pressed", prompt(600), 4), here(pool, "shorter", prompt(300, seed=1), 4)
    assert chunks(pool) == {"shorter": 150, "pressed": 50}  # no objective; the reserve is the oldest's
    pressed.wanted_by = 51.7
    assert chunks(pool) == {"pressed": 200}
    pressed.wanted_by, shorter.wanted_by = 50.5, 59.0  # too late
    assert chunks(pool) == {"shorter": 150, "pressed": 50}
    pool.finish()
    assert pool.blocks.held_count == 0


def test_a_token_whose_logits_came_with_a_handoff_does_not_wait_for_a_step_of_prompts() -> None:
    pool = Pool(pages=400, prompts=Prompts(chunk_tokens=256, step_s=0.3, cost=learned()))
    long = here(pool, "p", prompt(600), 4)
    pool.step()
    pool.start("s", prompt(20), 8)
    before = long.cached
    assert pool.step() == ["s"] and long.cached == before
    pool.read()
    assert pool.step() == ["s"] and long.cached > before
    pool.finish()
    assert pool.blocks.held_count == 0


def test_before_anything_was_measured_a_step_with_streams_gets_the_least() -> None:
    pool = Pool(pages=400, prompts=Prompts(chunk_tokens=256, step_s=1.0))
    pool.start("s", prompt(20, seed=1), 200)
    pool.step()
    here(pool, "p", prompt(600), 4)
    pool.read()
    assert chunks(pool) == {"p": LEAST_TOKENS, "s": 1}


def test_without_a_limit_every_step_gets_all_tokens() -> None:
    pool = Pool(pages=400, prompts=Prompts(chunk_tokens=64, step_s=0.0, cost=learned()))
    pool.start("s", prompt(20, seed=1), 200)
    pool.step()
    here(pool, "p", prompt(600), 4)
    pool.read()
    assert chunks(pool) == {"p": 64, "s": 1}


def test_a_short_prompt_overtakes_a_long_one_which_goes_on_beside_it() -> None:
    pool = Pool(pages=400, prompts=Prompts(chunk_tokens=64, step_s=0.0))
    long = here(pool, "long", prompt(800), 2)
    assert chunks(pool) == {"long": 64}
    short = here(pool, "short", prompt(100, seed=1), 2)
    took = [chunks(pool), chunks(pool), chunks(pool)]
    assert [t["short"] for t in took] == [48, 48, 4]
    assert all(t["long"] >= 16 for t in took)
    assert short.generation.output and long.state is State.PREFILLING
    pool.finish()
    assert short.generation.output == pool.expected(prompt(100, seed=1), 2)
    assert long.generation.output == pool.expected(prompt(800), 2)
    assert pool.blocks.held_count == 0 and pool.scheduler.recomputed_tokens == 0


def test_a_prompt_that_loses_its_pages_finds_or_computes_its_tokens_again() -> None:
    pool = Pool(pages=32, prompts=Prompts(chunk_tokens=10, step_s=0.0))
    ids = prompt(45)
    sequence = here(pool, "p", ids, 5)
    chunks(pool)
    chunks(pool)
    memory(pool).preempt(sequence)
    assert (sequence.state, sequence.pages) == (State.PREEMPTED, ())
    assert chunks(pool) == {"p": 30} and sequence.work.computed == 30  # five full pages were found again
    memory(pool).preempt(sequence)
    forget_cached(pool)
    chunks(pool)
    assert (sequence.state, sequence.cached) == (State.PREFILLING, 10)
    pool.finish()
    assert sequence.generation.output == pool.expected(ids, 5)
    assert pool.scheduler.recomputed_tokens == 30
    assert pool.blocks.held_count == 0


def test_a_prompt_waits_for_pages_in_turn_and_ends_cleanly_while_it_waits() -> None:
    pool = Pool(pages=12, prompts=Prompts(chunk_tokens=64, step_s=0.0))
    first = here(pool, "a", prompt(40), 4)
    second, third = here(pool, "b", prompt(30, seed=1), 4), here(pool, "c", prompt(30, seed=2), 4)
    assert (first.state, second.state, third.state) == (State.PREFILLING, State.WAITING, State.WAITING)
    assert not second.pages and not second.held
    pool.scheduler.leave(second, State.ABORTED, RuntimeError("gone"))  # type: ignore[arg-type]
    pool.finish()
    assert third.state is State.DONE and pool.granted == ["a", "c"]
    assert third.generation.output == pool.expected(prompt(30, seed=2), 4)
    assert pool.blocks.held_count == 0 and not pool.scheduler.grants


def test_a_prompt_of_one_token_computes_its_pages_too_and_finds_what_others_left() -> None:
    pool = Pool(pages=16, prompts=Prompts(chunk_tokens=64, step_s=0.0))
    here(pool, "a", prompt(21), 1)
    assert chunks(pool) == {"a": 21} and pool.blocks.held_count == 0
    again = here(pool, "b", prompt(21), 1)
    assert chunks(pool) == {"b": 1} and again.work.found == 20
    assert again.generation.output == pool.expected(prompt(21), 1)


def test_what_is_told_of_rates_follows_the_streams() -> None:
    prompts = Prompts(chunk_tokens=256, step_s=0.1, cost=learned(), told=learned())
    assert prompts.tokens_per_s() == 0  # no prompt was computed here: nobody should rely on it
    prompts.computed = 1
    alone = prompts.tokens_per_s()
    beside = [(100, 1)] * 4
    shared = prompts.shared_tokens_per_s(beside)
    assert alone == pytest.approx(256 / seconds([(0, 256)]), rel=0.05)
    assert shared < 0.85 * alone
    # Without streams one that comes before this is read is allowed for, but nobody waits for it now.
    assert prompts.shared_tokens_per_s([]) == prompts.shared_tokens_per_s([(512, 1)]) < alone
    waiting = [sequence(200), sequence(2000)]
    assert prompts.wait_s(waiting, []) == pytest.approx(200 * 4 / 3 / alone, rel=0.01)
    assert prompts.wait_s([], beside) == 0
    assert prompts.wait_s(waiting, beside) == pytest.approx(200 * 4 / 3 / shared, rel=0.01)  # the long one lets it pass


def sequence(tokens: int) -> Sequence:
    return Bench(pages=1000).sequence("x", prompt(tokens), 2)
