"""The order of prompts: a schedule worked out by hand, and the bound on how long anybody waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.blocks import BlockManager
from pdserve.engine.order import Turns, delay_bound, pressing, share_out
from pdserve.engine.prefix import Prefix
from prefill_worker.scheduler import Prompt, Scheduler, State


@dataclass
class Worker:
    """Computes plans at once and counts tokens; pages suffice for everybody."""

    chunk_tokens: int = 16
    batch_tokens: int = 8
    computed: int = 0  # tokens of all steps so far
    ended: dict[str, int] = field(default_factory=dict)  # owner -> `computed` after its last step

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            BlockManager(4000, 4),
            page_size=4,
            chunk_tokens=self.chunk_tokens,
            batch_tokens=self.batch_tokens,
            step_s=math.inf,
            max_queue=100,
            max_running=100,
            lease_s=10.0,
            clock=lambda: float(self.computed),  # a token takes a second
        )
        self.scheduler.cost.observe([(0, 1)], 1.0)

    def submit(self, owner: str, length: int, tenant: str = "", wanted_by: float = math.inf) -> None:
        ids = tuple(range(length))
        prefix = Prefix(owner.encode(), ids, 4)
        self.scheduler.submit(Prompt(owner, ids, prefix, 100.0, 100.0, tenant, wanted_by=wanted_by))

    def step(self) -> dict[str, int]:
        """Tokens per prompt."""
        s = self.scheduler
        s.admit(0.0)
        plan, prompts = s.plan()
        tokens = {chunk.key: len(chunk.ids) for chunk in plan.chunks}
        self.computed += sum(tokens.values())
        for prompt in s.apply(plan, prompts):
            s.commit(prompt)
            s.release(prompt, State.RELEASED)
            self.ended[prompt.owner] = self.computed
        return tokens

    def rest(self) -> list[dict[str, int]]:
        """Steps until nobody is left."""
        steps = []
        while step := self.step():
            steps.append(step)
        assert self.scheduler.idle and self.scheduler.blocks.held_count == 0
        return steps


def test_short_prompts_overtake_a_long_one_which_goes_on_beside_them() -> None:
    worker = Worker()
    worker.submit("long", 60)
    assert worker.step() == {"long": 16}
    for owner, length in (("a", 5), ("b", 3), ("c", 9)):
        worker.submit(owner, length)
    assert worker.rest() == [
        {"long": 3, "a": 5, "b": 3},  # 8 tokens of the shortest; of 11 a quarter is the oldest's
        {"long": 3, "c": 9},
        {"long": 16},  # alone, it has whole steps
        {"long": 16},
        {"long": 6},
    ]


def test_a_step_that_is_full_of_the_shortest_keeps_a_quarter_for_the_oldest() -> None:
    worker = Worker()
    worker.submit("old", 100)
    worker.step()
    worker.submit("young", 40)
    assert [worker.step() for _ in range(4)] == [
        {"old": 4, "young": 12},
        {"old": 4, "young": 12},
        {"old": 4, "young": 12},
        {"old": 7, "young": 4},  # filled up to 8 with old's, and a third of that is reserved
    ]


def test_tenants_take_turns_in_what_is_reserved() -> None:
    """A's two prompts came first and are shorter; B's long one has half of every reserve from the start."""
    worker = Worker()
    for owner, length, tenant in (("A1", 30, "A"), ("A2", 20, "A"), ("B1", 40, "B")):
        worker.submit(owner, length, tenant)
    assert worker.rest() == [
        {"A1": 4, "A2": 12},  # had before it: A 0, B 0
        {"A2": 8, "B1": 3},  # A 4, B 0
        {"A1": 12, "B1": 4},  # A 4, B 3
        {"A1": 14, "B1": 2},  # A 4, B 7: A1's last 2 of the reserve of 4, then B
        {"B1": 16},
        {"B1": 15},
    ]


def test_a_tenant_that_comes_anew_begins_behind_those_that_are_here() -> None:
    turns = Turns()
    turns.keep(("a", "b"))
    turns.took([("a", 5), ("b", 7)])
    turns.keep(("a", "b", "c"))
    assert turns.had == {"a": 5, "b": 7, "c": 7}
    turns.keep(("b", "c"))
    turns.keep(("a", "b", "c"))
    assert turns.had["a"] == 7  # leaving and coming back is no way to the front


def test_who_would_be_late_after_another_step_goes_first_and_who_is_late_already_does_not() -> None:
    worker = Worker()
    worker.submit("long", 40, wanted_by=45.0)
    worker.submit("short", 8)
    steps = [{"long": 16}, {"long": 16}, {"long": 8, "short": 3}, {"short": 5}]
    assert worker.rest() == steps  # ended after 43 tokens; with "short" first it would be 48
    worker = Worker()
    worker.submit("late", 40, wanted_by=30.0)
    worker.submit("short", 8)
    assert worker.step() == {"short": 8, "late": 3}  # as if it had no objective
    worker = Worker()
    worker.submit("patient", 40, wanted_by=80.0)
    worker.submit("short", 8)
    assert worker.step() == {"short": 8, "patient": 3}


def test_of_several_that_press_the_earliest_objective_comes_first() -> None:
    prompts = [
        Prompt(str(n), (1,) * 10, Prefix(b"", (), 4), 0.0, 0.0, wanted_by=by) for n, by in enumerate((21, 19, 99))
    ]
    found = pressing(prompts, 8.0, lambda prompt: prompt.remaining, 5.0)
    assert [prompt.owner for prompt in found] == ["1", "0"]
    assert pressing(prompts, 12.5, lambda prompt: prompt.remaining, 5.0) == []  # too late for two, early for one


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    chunk=st.integers(4, 40),
    batch=st.integers(4, 40),
)
@settings(max_examples=200, deadline=None)
def test_a_step_is_as_large_as_it_may_be_and_gives_nobody_more_than_is_left(
    lengths: list[int], chunk: int, batch: int
) -> None:
    prompts = [Prompt(str(n), tuple(range(k)), Prefix(b"", (), 4), 0.0, 0.0, str(n % 3)) for n, k in enumerate(lengths)]
    shares = share_out(prompts, Turns(), chunk, batch)
    given_out = {index: shares.of(index) for index in shares.chosen}
    assert all(0 < tokens <= lengths[index] for index, tokens in given_out.items())
    assert sum(given_out.values()) <= chunk
    free = chunk * 3 // 4
    shortest = min(lengths)
    assert sum(given_out.values()) >= min(sum(lengths), max(min(batch, free), min(shortest, free)))
    reserved = sum(shares.reserved.values())
    assert 4 * reserved >= sum(given_out.values()) or given_out == dict(enumerate(lengths))


LONG = "long"


@given(data=st.data(), chunk=st.sampled_from([4, 7, 16, 30]), tenants=st.integers(1, 4), tokens=st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_nobody_waits_for_longer_than_the_bound_whoever_else_comes(
    data: st.DataObject, chunk: int, tenants: int, tokens: int
) -> None:
    """Others come before every step as long as the prompt is here, of its own tenant and of others, of any length
    and with any objective.
    """
    worker = Worker(chunk_tokens=chunk, batch_tokens=min(8, chunk))
    names = [f"tenant{n}" for n in range(tenants)]
    wishes = st.one_of(st.just(math.inf), st.floats(0, 200))  # seconds, for the first token
    flood = st.lists(st.tuples(st.integers(1, 60), st.sampled_from(names), wishes), max_size=3)
    count = 0

    def arrive() -> None:
        nonlocal count
        for length, tenant, within in data.draw(flood):
            if len(worker.scheduler.waiting) < 90:
                count += 1
                worker.submit(str(count), length, tenant, worker.computed + within)

    for _ in range(data.draw(st.integers(0, 4))):
        arrive()
        worker.step()
    older = sum(p.remaining for p in (*worker.scheduler.waiting, *worker.scheduler.running) if p.tenant == names[0])
    began = worker.computed
    worker.submit(LONG, tokens, names[0])
    bound = delay_bound(older, tokens, tenants, chunk)
    while LONG not in worker.ended:
        arrive()
        worker.step()
        assert worker.computed - began <= bound
    worker.rest()


@pytest.mark.parametrize("tenants", [1, 3])
def test_a_flood_of_short_prompts_cannot_starve_a_long_one(tenants: int) -> None:
    """Each flooding tenant always has twenty prompts of one token here: nothing else would ever be shortest."""
    worker = Worker(chunk_tokens=8, batch_tokens=8)
    worker.submit(LONG, 100, "patient")
    count = 0
    while LONG not in worker.ended:
        while len(worker.scheduler.waiting) < 20 * tenants:
            count += 1
            worker.submit(f"flood{count}", 1, f"flood{count % tenants}")
        worker.step()
        assert worker.computed <= delay_bound(0, 100, tenants + 1, 8)
    assert worker.computed >= 300  # the flood was there, and had its part
    worker.rest()


def test_a_tenant_with_a_new_name_for_every_prompt_gains_nothing() -> None:
    """Two prompts under fresh names are always here besides: three tenants at a time."""
    worker = Worker(chunk_tokens=8, batch_tokens=8)
    worker.submit(LONG, 100, "patient")
    count = 0
    while LONG not in worker.ended:
        while len(worker.scheduler.waiting) + len(worker.scheduler.running) < 3:
            count += 1
            worker.submit(f"flood{count}", 6, f"name{count}")
        worker.step()
        assert worker.computed <= delay_bound(0, 100, 3, 8)
    worker.rest()
