"""Pages and turns, without an engine: what is granted, pinned, published and given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cache_transfer.contract import WorkerContract
from decode_worker.admission import DecodeRequest
from decode_worker.generation import Generation
from decode_worker.sampling import Choice
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import FirstLogits, Outcome, Sequence, State
from decode_worker.step import DecodeOutput
from decode_worker.stream import EventStream
from pdserve.engine.blocks import BlockManager
from pdserve.engine.plan import Chunk, StepCounters
from pdserve.engine.prefix import Prefix
from pdserve.errors import Exhausted, Internal, Refused
from pdserve.request import SamplingParams
from tests.engine.tiny import prompt, tiny_engine

CONTRACT: WorkerContract = tiny_engine().contract()


class Bench:
    """A scheduler over a few pages of four tokens."""

    def __init__(self, pages: int = 16, **settings: Any) -> None:
        self.blocks = BlockManager(pages, 4)
        self.left: list[Outcome] = []
        self.granted: list[str] = []
        given: dict[str, Any] = {"max_queue": 8, "max_batch": 4, **settings}
        self.scheduler = Scheduler(self.blocks, on_exit=lambda _, o: self.left.append(o), **given)

    def sequence(self, key: str, ids: tuple[int, ...], output: int, tenant: str = "t", choices: int = 0) -> Sequence:
        """One that waits; with `choices` it only brings the cache for so many outputs."""
        params = SamplingParams(temperature=0, max_tokens=output)
        made = Sequence(
            key=key,
            request=DecodeRequest(key, "", tenant, None, ids, (), 0, params, CONTRACT),
            generation=Generation(ids, params, output),
            stream=EventStream(limit=4, outputs=max(1, choices)),
            prefix=Prefix(tenant.encode(), ids, 4),
            cache_tokens=len(ids) + output - 1 if output > 1 else 0,
        )
        made.choices = tuple(
            replace(
                made,
                key=f"{key}/{number}",
                generation=Generation(ids, params, output, choice=number),
                prefix=made.prefix.copy(),
                state=State.VERIFIED,
                origin=made,
            )
            for number in range(choices)
        )
        self.scheduler.submit(made)
        return made

    def open(self, sequence: Sequence) -> None:
        self.scheduler.request_grant(sequence, lambda: self.granted.append(sequence.key))

    def verify(self, sequence: Sequence) -> None:
        sequence.first = FirstLogits("fp32", b"")
        self.scheduler.join(sequence)

    def step(self) -> list[str]:
        """One step in which every sequence gets token 7."""
        plan = self.scheduler.plan()
        choices = dict.fromkeys(plan.samplers, Choice(7))
        self.scheduler.apply(plan, DecodeOutput(choices, StepCounters()))
        self.blocks.check_integrity()
        return list(plan.samplers)

    def run(self, sequence: Sequence) -> None:
        self.open(sequence)
        self.verify(sequence)
        while sequence.state is not State.DONE:
            self.step()
            sequence.stream._unread, sequence.stream.full_since = 0, None


def test_a_grant_covers_what_arrives_and_the_first_growth_and_the_rest_comes_page_by_page() -> None:
    bench = Bench()
    sequence = bench.sequence("a", prompt(6), 5)  # 6 + 4 cached tokens in the end
    assert bench.blocks.held_count == 0
    bench.open(sequence)
    assert (bench.blocks.held_count, len(sequence.pages), sequence.state) == (2, 2, State.GRANTED)
    bench.verify(sequence)
    chunks: list[Chunk] = []
    held: list[int] = []
    for _ in range(5):
        plan = bench.scheduler.plan()
        chunks += plan.step.chunks
        held.append(bench.blocks.held_count)
        bench.scheduler.apply(plan, DecodeOutput({"a": Choice(7)}, StepCounters()))
        sequence.stream._unread, sequence.stream.full_since = 0, None
    assert [(c.start, len(c.pages)) for c in chunks] == [(6, 2), (7, 2), (8, 3), (9, 3)]
    assert held == [2, 2, 2, 3, 3]
    assert bench.left == [Outcome("a", State.DONE)] and bench.blocks.held_count == 0
    # What was cached is findable: the prompt and all output but the last token, in full pages.
    assert bench.blocks.match(Prefix(b"t", (*prompt(6), 7, 7, 7, 7, 7), 4), 99)[1] == 8


def test_a_prefix_is_pinned_until_its_sequence_leaves() -> None:
    bench = Bench(pages=8)
    bench.run(bench.sequence("a", prompt(9), 2))
    again = bench.sequence("b", prompt(9), 2)
    assert (again.cached, len(again.held), bench.blocks.held_count) == (8, 2, 2)
    with pytest.raises(Exhausted):
        bench.blocks.allocate("x", 7)  # the pinned pages cannot be evicted
    bench.open(again)
    assert again.pages[:2] == again.held and bench.blocks.held_count == 3
    bench.scheduler.ungrant(again)  # the attempt failed: the pin stays
    assert (again.state, again.pages, bench.blocks.held_count) == (State.WAITING, (), 2)
    bench.scheduler.leave(again, State.ABORTED, Refused("gone"))
    assert bench.blocks.held_count == 0


def test_at_most_the_prompt_less_one_token_is_held() -> None:
    bench = Bench()
    bench.run(bench.sequence("a", prompt(8), 6))
    assert bench.sequence("b", prompt(8), 2).cached == 4
    assert bench.sequence("c", (*prompt(8), 7), 2).cached == 8


def test_pins_leave_half_of_the_pool() -> None:
    bench = Bench(pages=8)
    bench.run(bench.sequence("a", prompt(13), 2))
    bench.run(bench.sequence("b", prompt(13, seed=1), 2))
    held = [bench.sequence(f"c{n}", prompt(13, seed=n % 2), 2).cached for n in range(4)]
    assert held == [12, 0, 12, 0]  # three pages each, of which those that are shared cost nothing


def test_other_tenants_and_logits_only_requests_pin_nothing() -> None:
    bench = Bench()
    bench.run(bench.sequence("a", prompt(9), 2))
    assert bench.sequence("b", prompt(9), 2, tenant="u").cached == 0
    assert bench.sequence("c", prompt(9), 1).cached == 0


def test_grants_come_in_order() -> None:
    bench = Bench(pages=8)
    a, b, c = (bench.sequence(k, prompt(n, seed=n), 2) for k, n in (("a", 20), ("b", 23), ("c", 3)))
    for sequence in (a, b, c):
        bench.open(sequence)
    assert bench.granted == ["a"]  # c would fit, but b is before it
    bench.scheduler.leave(a, State.ABORTED, Refused("gone"))
    assert bench.granted == ["a", "b", "c"]


def test_pins_of_earlier_requests_do_not_block_a_large_one_for_ever() -> None:
    bench = Bench(pages=8)
    bench.run(bench.sequence("a", prompt(9), 2))
    small = bench.sequence("small", prompt(9), 2)  # pins two pages
    big = bench.sequence("big", prompt(30, seed=5), 2)  # the whole pool
    assert bench.sequence("late", prompt(9), 2).held == ()  # or there might always be one more
    bench.open(big)
    bench.open(small)
    assert bench.granted == ["a", "small"]
    bench.verify(small)
    assert [bench.step(), bench.step()] == [["small"], ["small"]]
    assert small.state is State.DONE and bench.granted == ["a", "small", "big"]


def test_a_withdrawn_push_lets_the_next_one_in() -> None:
    bench = Bench(pages=8)
    a, b, c = (bench.sequence(k, prompt(n, seed=n), 2) for k, n in (("a", 20), ("b", 23), ("c", 3)))
    bench.open(a)
    waiting = bench.scheduler.request_grant(b, lambda: bench.granted.append("b"))
    bench.open(c)
    bench.scheduler.withdraw(waiting)
    assert bench.granted == ["a", "c"]


def test_a_batch_is_bounded_and_oldest_first() -> None:
    bench = Bench(pages=64, max_batch=2)
    for n in range(4):
        sequence = bench.sequence(f"s{n}", prompt(3, seed=n), 3)
        bench.open(sequence)
        bench.verify(sequence)
    turns = [bench.step() for _ in range(6)]
    assert turns == [["s0", "s1"]] * 3 + [["s2", "s3"]] * 3
    assert bench.scheduler.idle and bench.step() == []


def test_a_full_stream_gives_its_turn_away() -> None:
    bench = Bench(max_batch=1)
    a, b = (bench.sequence(key, prompt(3), 9) for key in "ab")
    for sequence in (a, b):
        bench.open(sequence)
        bench.verify(sequence)
    assert [bench.step() for _ in range(6)] == [["a"]] * 4 + [["b"]] * 2
    assert a.stream.unread == 4 and a.stream.full_since is not None


def test_a_failed_step_fails_its_sequences() -> None:
    bench = Bench()
    a, b = (bench.sequence(key, prompt(3), 9) for key in "ab")
    bench.open(a)
    bench.verify(a)
    plan = bench.scheduler.plan()
    bench.open(b)
    bench.verify(b)
    bench.scheduler.abandon(plan, Internal("broken"))
    assert bench.left == [Outcome("a", State.FAILED)] and b.state is State.VERIFIED
    assert bench.step() == ["b"]


def test_impossible_steps_of_the_state_machine_are_refused() -> None:
    bench = Bench()
    sequence = bench.sequence("a", prompt(3), 4)
    with pytest.raises(Internal, match="cannot go from waiting to decoding"):
        sequence.move(State.DECODING)
    bench.scheduler.leave(sequence, State.EXPIRED, Refused("late"))
    for state in State:
        with pytest.raises(Internal):
            sequence.move(state)
