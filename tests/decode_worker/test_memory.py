"""Who gets pages and who loses them, without an engine: growth, preemption, watermark, pins."""

from __future__ import annotations

import random
from collections.abc import Sequence as Series
from typing import Any

import pytest

from decode_worker.memory import Memory
from decode_worker.sampling import Choice
from decode_worker.sequence import HANDOFF, Sequence, State
from decode_worker.settings import DecodeSettings
from decode_worker.step import DecodeOutput
from pdserve.engine.plan import StepCounters
from pdserve.errors import ConfigError, Refused
from tests.decode_worker.test_scheduler import Bench
from tests.engine.tiny import prompt

PAGE = 4


class Pool(Bench):
    """A bench that also keeps what each page would hold, and checks it whenever a step reads it.

    The model is a function of all tokens so far, so that a wrong page or a lost token changes the output.
    """

    def __init__(self, pages: int, **settings: Any) -> None:
        super().__init__(pages, **settings)
        self.slots: dict[tuple[int, int], object] = {}
        self.refused = 0

    @staticmethod
    def model(tokens: Series[int]) -> int:
        return (3 * sum(tokens) + 5 * tokens[-1] + len(tokens)) % 7

    def expected(self, ids: tuple[int, ...], output: int) -> list[int]:
        tokens = list(ids)
        for _ in range(output):
            tokens.append(self.model(tokens))
        return tokens[len(ids) :]

    def start(self, key: str, ids: tuple[int, ...], output: int, tenant: str = "t") -> Sequence:
        """One that runs already."""
        sequence = self.sequence(key, ids, output, tenant)
        self.open(sequence)
        assert sequence.state is State.GRANTED
        self.verify(sequence)
        return sequence

    def verify(self, sequence: Sequence) -> None:
        """The cache arrives: what is held is checked, the rest is written."""
        if not sequence.logits_only:
            self.check(sequence, sequence.cached, sequence.pages)
            self.write(sequence, sequence.cached, len(sequence.ids), sequence.pages)
        super().verify(sequence)

    def write(self, sequence: Sequence, start: int, end: int, pages: Series[int]) -> None:
        for at in range(start, end):
            self.slots[pages[at // PAGE], at % PAGE] = (sequence.request.tenant, sequence.tokens(0, at + 1))

    def check(self, sequence: Sequence, end: int, pages: Series[int]) -> None:
        for at in range(end):
            assert self.slots[pages[at // PAGE], at % PAGE] == (sequence.request.tenant, sequence.tokens(0, at + 1))

    def step(self) -> list[str]:
        """One step of the model; returns the keys of those that got a token."""
        scheduler = self.scheduler
        plan = scheduler.plan()
        known = {s.key: s for s in scheduler.running}
        written: set[int] = set()
        for chunk in plan.step.chunks:
            sequence, end = known[chunk.key], chunk.start + len(chunk.ids)
            assert chunk.ids == sequence.tokens(chunk.start, end) and len(chunk.pages) * PAGE >= end
            own = set(chunk.pages[chunk.start // PAGE :])
            assert not own & written  # two sequences never write one page
            written |= own
            self.check(sequence, chunk.start, chunk.pages)
            self.write(sequence, chunk.start, end, chunk.pages)
        tokens = {key: self.model(known[key].tokens(0, known[key].length)) for key in plan.samplers}
        scheduler.apply(plan, DecodeOutput({key: Choice(token) for key, token in tokens.items()}, StepCounters()))
        self.blocks.check_integrity()
        return list(plan.samplers)

    def read(self, *sequences: Sequence) -> None:
        """Their readers catch up."""
        for sequence in sequences or tuple(self.scheduler.running):
            sequence.stream._unread, sequence.stream.full_since = 0, None

    def finish(self) -> None:
        """Everybody reads until all are done; a stall fails."""
        for _ in range(2000):
            if not self.scheduler.running:
                return
            self.read()
            self.step()
        raise AssertionError(f"stalled: {self.scheduler.running}")


def memory(pool: Bench) -> Memory:
    return pool.scheduler._memory


def test_when_no_page_is_left_the_youngest_loses_its_own_and_ends_up_with_the_same_output() -> None:
    pool = Pool(pages=6)
    a, b = pool.start("a", prompt(7), 14), pool.start("b", prompt(7, seed=1), 14)  # five pages each in the end
    while a.state is not State.DONE:
        pool.read()
        got = pool.step()
        assert "a" in got  # the oldest never waits
        if b.state is State.PREEMPTED:
            assert b.pages == b.held == () and b.cached == 0 and b.key not in pool.blocks.holdings()
    assert pool.scheduler.preemptions == 1
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


def forget_cached(pool: Bench) -> None:
    """Evicts whatever nobody holds."""
    pool.blocks.allocate("x", pool.blocks.available_count)
    pool.blocks.release("x")


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
    assert pool.scheduler.preemptions == 2


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


def grown_until_stuck(pool: Pool, sequence: Sequence) -> None:
    while not memory(pool).stuck:
        pool.read()
        pool.step()
    assert pool.blocks.available_count == 0 and sequence.pages and sequence.state is State.DECODING


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
    while not pool.scheduler.preemptions:
        pool.read()
        pool.step()
    assert [s.state for s in (a, b, c)] == [State.DECODING, State.DECODING, State.PREEMPTED]
    pool.finish()


def test_pins_make_growth_wait_but_not_for_ever() -> None:
    pool = Pool(pages=8)
    pool.start("old", prompt(5), 4)
    pool.finish()
    waiting = pool.sequence("waiting", (*prompt(5), 1), 2)
    assert len(waiting.held) == 1
    a = pool.start("a", prompt(9, seed=1), 24)  # eight pages in the end
    grown_until_stuck(pool, a)
    cached = a.cached
    assert (cached, len(a.pages)) == (28, 7)
    late = pool.sequence("late", (*prompt(5), 2), 2)
    assert late.held == ()  # no more pins while somebody lacks pages
    pool.open(waiting)
    assert waiting.state is State.WAITING and pool.step() == [] and a.cached == cached
    for sequence in (waiting, late):  # their tickets expire
        pool.scheduler.leave(sequence, State.EXPIRED, Refused("late"))
    pool.finish()
    assert a.generation.output == pool.expected(prompt(9, seed=1), 24)


def test_a_page_that_comes_back_goes_to_one_that_cannot_grow_and_only_then_to_an_open_push() -> None:
    pool = Pool(pages=8)
    pool.start("old", prompt(9), 4)
    pool.finish()
    waiting = pool.sequence("waiting", (*prompt(9), 1), 2)
    assert len(waiting.held) == 2
    a = pool.start("a", prompt(9, seed=1), 22)
    grown_until_stuck(pool, a)
    new = pool.sequence("new", prompt(2), 2)
    pool.open(new)
    pool.scheduler.leave(waiting, State.EXPIRED, Refused("late"))
    assert new.state is State.WAITING and pool.blocks.available_count == 2
    pool.read()
    assert pool.step() == ["a"] and len(a.pages) == 7
    assert str(new.state) == "granted"  # by the same plan: nothing else might come that asks again
    pool.scheduler.leave(new, State.ABORTED, Refused("gone"))
    pool.finish()


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


@pytest.mark.parametrize(("seed", "watermark"), [(0, 0.0), (1, 0.0), (2, 0.1), (3, 0.3)])
def test_random_traffic_on_eight_pages_stalls_nobody_and_never_reads_a_wrong_page(seed: int, watermark: float) -> None:
    """Requests come, wait, are pushed, abandoned, cancelled, paused and preempted in any order."""
    draw = random.Random(seed)
    pool = Pool(pages=8, growth_watermark=watermark, recompute_tokens=3)
    wanted: dict[str, tuple[Sequence, list[int]]] = {}
    for number in range(4000):
        waiting = pool.scheduler.waiting
        action = draw.random()
        if action < 0.12 and len(waiting) < 6:
            ids = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 15)))
            if wanted and draw.random() < 0.5:  # what was said before, and more
                earlier = draw.choice([s for s, _ in wanted.values()])
                ids = (*earlier.tokens(0, draw.randrange(1, 13)), 1)
            output = draw.randrange(1, 19)
            made = pool.sequence(f"s{number}", ids, output, draw.choice("tu"))
            wanted[made.key] = (made, pool.expected(ids, output))
        elif action < 0.3 and waiting:
            pool_turn(pool, draw.choice(waiting), draw)
        elif action < 0.31 and (here := [*waiting, *pool.scheduler.running]):
            pool.scheduler.leave(draw.choice(here), State.ABORTED, Refused("gone"))
        elif action < 0.5 and pool.scheduler.running:
            pool.read(draw.choice(pool.scheduler.running))
        else:
            pool.step()
        pool.blocks.check_integrity()
    for _ in range(400):
        if pool.scheduler.idle:
            break
        for sequence in list(pool.scheduler.waiting):
            pool_turn(pool, sequence, None)
        pool.read()
        pool.step()
    assert pool.scheduler.idle and pool.blocks.held_count == 0 and not pool.blocks.holdings()
    done = [(s.generation.output, expected) for s, expected in wanted.values() if s.state is State.DONE]
    assert all(output == expected for output, expected in done)
    assert len(done) > 100
    assert watermark > 0.1 or (pool.scheduler.preemptions > 30 and pool.scheduler.recomputed_tokens > 200)


def pool_turn(pool: Pool, sequence: Sequence, draw: random.Random | None) -> None:
    """The next thing that happens to one that waits: its push opens, its cache comes whole, or breaks off."""
    assert sequence.state in HANDOFF
    pushed = any(request.sequence is sequence for request in pool.scheduler.grants)
    if sequence.pages and draw is not None and draw.random() < 0.2:
        pool.scheduler.ungrant(sequence)
    elif sequence.pages or sequence.logits_only:
        pool.verify(sequence)
    elif not pushed:
        pool.open(sequence)


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
