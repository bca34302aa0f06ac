"""The scheduler alone: plans, pages and states, with a clock that the test owns."""

from __future__ import annotations

import math

import pytest

from pdserve.engine.blocks import BlockManager
from pdserve.engine.plan import StepPlan
from pdserve.engine.prefix import Prefix
from pdserve.engine.rate import StepCost
from pdserve.errors import ConfigError, Exhausted
from prefill_worker.scheduler import Prompt, Scheduler, State
from prefill_worker.settings import PrefillSettings


def scheduler(
    pages: int = 64, chunk_tokens: int = 16, max_queue: int = 8, max_running: int = 4, step_s: float = math.inf
) -> Scheduler:
    return Scheduler(
        BlockManager(pages, 4),
        page_size=4,
        chunk_tokens=chunk_tokens,
        batch_tokens=8,
        step_s=step_s,
        max_queue=max_queue,
        max_running=max_running,
        lease_s=10.0,
    )


def made(owner: str, length: int, *, first: int = 0, deadline: float = 100.0, queue: float = 100.0) -> Prompt:
    ids = tuple(range(first, first + length))
    return Prompt(owner, ids, Prefix(b"same", ids, 4), deadline, queue)


def book(chosen: Scheduler) -> StepPlan:
    """Runs the next step: every prompt that it completes turns out sound."""
    plan, prompts = chosen.plan()
    for prompt in chosen.apply(plan, prompts):
        chosen.commit(prompt)
    return plan


def sizes(chosen: Scheduler) -> dict[str, int]:
    """Tokens per prompt of the next step, which is then booked."""
    plan = book(chosen)
    return {chunk.key: len(chunk.ids) for chunk in plan.chunks}


def empty(chosen: Scheduler) -> None:
    chosen.blocks.check_integrity()
    assert chosen.idle and chosen.blocks.held_count == 0


def test_one_prompt_goes_through_its_states() -> None:
    s = scheduler()
    prompt = made("a", 20)
    s.submit(prompt)
    assert (str(prompt.state), s.blocks.held_count, s.queued_tokens) == ("queued", 0, 20)
    assert s.admit(now=5.0) == [prompt]
    assert (str(prompt.state), s.blocks.held_count) == ("running", 5)
    assert prompt.deadline == 15.0  # the lease begins when the pages do
    plan, prompts = s.plan()
    assert [(c.start, len(c.ids), c.logits) for c in plan.chunks] == [(0, 16, "none")]
    assert s.apply(plan, prompts) == [] and str(prompt.state) == "running"
    plan, prompts = s.plan()
    assert [(c.start, len(c.ids), c.logits) for c in plan.chunks] == [(16, 4, "last")]
    assert s.apply(plan, prompts) == [prompt] and str(prompt.state) == "running"
    s.commit(prompt)
    assert str(prompt.state) == "committed"
    assert s.plan() == (type(plan)(()), []) and prompt.chunks == 2
    assert s.blocks.held_count == 5  # until decode has acknowledged
    s.release(prompt, State.RELEASED)
    empty(s)
    assert s.blocks.cached_count == 5


def test_a_queued_prompt_gets_pages_only_when_its_turn_has_come() -> None:
    """The short prompt overtakes: the long one still waits, without a page, though there are places and pages."""
    s = scheduler()
    prompts = [made("first", 60), made("long", 80, first=100), made("short", 5, first=200)]
    for prompt in prompts:
        s.submit(prompt)
    assert [p.owner for p in s.admit(0.0)] == ["first", "short"]
    assert s.blocks.holdings().keys() == {"first", "short"} and s.waiting == [prompts[1]]
    # Short takes 5 tokens, the step is filled up to 8 with first's, and a third more is first's by reserve.
    assert sizes(s) == {"first": 6, "short": 5}
    assert s.admit(0.0) == []
    for prompt in prompts:
        s.release(prompt, State.ABORTED)
    empty(s)


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


def test_a_step_that_would_take_too_long_is_halved() -> None:
    s = scheduler(chunk_tokens=32, pages=200, step_s=1.0)
    prompt = made("a", 300)
    s.submit(prompt)
    s.admit(0.0)
    assert sizes(s) == {"a": 32}  # nothing is known yet
    s.cost.observe([(0, 32)], 0.9)
    assert sizes(s) == {"a": 32}
    s.cost = StepCost()
    s.cost.observe([(0, 32)], 1.9)
    assert sizes(s) == {"a": 16}
    s.cost = StepCost()
    s.cost.observe([(0, 32)], 100.0)
    assert sizes(s) == {"a": 8}  # as many as a step is filled up to, not fewer
    s.release(prompt, State.ABORTED)
    empty(s)


def test_the_wait_of_a_prompt_is_for_those_that_are_not_longer() -> None:
    s = scheduler()
    assert s.wait_s(10) == 0.0
    s.cost.observe([(0, 16)], 1.6)
    for prompt in (made("a", 30), made("b", 3, first=50), made("c", 200, first=100)):
        s.submit(prompt)
    assert s.wait_s(2) == 0.0
    assert s.wait_s(3) == pytest.approx(0.4)  # 3 tokens, and 1 for the one that waits longest
    assert s.wait_s(1000) == pytest.approx(23.3)
    for prompt in tuple(s.waiting):
        s.release(prompt, State.ABORTED)
    empty(s)


def test_no_step_is_larger_than_allowed_and_every_prompt_ends() -> None:
    s = scheduler(chunk_tokens=9, max_running=4)
    prompts = [made(str(n), 5 + 7 * n, first=100 * n) for n in range(4)]
    for prompt in prompts:
        s.submit(prompt)
    s.admit(0.0)
    steps = 0
    while step := sizes(s):
        assert sum(step.values()) <= 9
        steps += 1
        for prompt in s.admit(0.0):
            assert prompt in s.running
    assert steps >= -(-sum(len(p.ids) for p in prompts) // 9)
    assert all(p.state is State.COMMITTED for p in prompts)


def test_a_full_queue_refuses() -> None:
    s = scheduler(max_queue=1)
    s.submit(made("a", 4))
    refused = made("b", 4)
    with pytest.raises(Exhausted) as failure:
        s.submit(refused, retry_after_ms=7)
    assert (failure.value.reason, failure.value.retry_after_ms) == ("QUEUE_FULL", 7)
    assert refused.state is State.REFUSED and len(s.waiting) == 1


def test_whoever_lacks_pages_is_passed_by_short_prompts_but_not_for_ever() -> None:
    s = scheduler(pages=6, max_queue=20)
    first = made("first", 12)
    s.submit(first)
    assert s.admit(0.0) == [first]
    book(s)  # and waits for its acknowledgement
    large = made("large", 20, first=50)  # five pages, three are free
    s.submit(large)
    passed = 0
    for number in range(20):
        small = made(f"small{number}", 8, first=100 * (number + 1))
        s.submit(small)
        if s.admit(0.0) == [small]:
            passed += 8
            s.release(small, State.ABORTED)
        assert large.state is State.QUEUED and "large" not in s.blocks.holdings()  # nothing half taken
    assert passed == 64  # the first that makes it more than three times 20; nobody after it
    assert s.blocks.holdings().keys() == {"first"}
    s.release(first, State.ABORTED)
    assert s.admit(0.0)[0] is large
    for prompt in (*s.running, *s.waiting):
        s.release(prompt, State.ABORTED)
    empty(s)


def test_no_more_prompts_than_places_hold_pages() -> None:
    s = scheduler(max_running=2)
    prompts = [made(str(n), 4, first=10 * n) for n in range(3)]
    for prompt in prompts:
        s.submit(prompt)
    assert s.admit(0.0) == prompts[:2]
    s.release(prompts[0], State.ABORTED)
    assert s.admit(0.0) == prompts[2:]
    for prompt in prompts:
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


def test_overdue_looks_at_the_ticket_in_the_queue_and_at_the_lease_after_it() -> None:
    s = scheduler(max_running=1)
    runs, waits = made("runs", 4, queue=3.0), made("waits", 4, first=9, queue=4.0)
    s.submit(runs)
    s.submit(waits)
    s.admit(1.0)
    assert s.overdue(3.9) == []
    assert s.overdue(4.0) == [waits]
    assert s.overdue(11.0) == [waits, runs]
    s.drop(runs)
    assert s.overdue(11.0) == [waits]
    s.release(waits, State.EXPIRED)
    s.release(runs, State.EXPIRED)
    empty(s)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue", 0),
        ("max_running", 0),
        ("chunk_tokens", 3),
        ("batch_tokens", 3),
        ("step_ms", 0.0),
        ("context_limit", -1),
        ("lease_s", 0.0),
        ("reap_s", float("nan")),
        ("grace_s", -1.0),
    ],
)
def test_settings_that_cannot_work_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as failure:
        PrefillSettings(**{field: value}).check()  # type: ignore[arg-type]
    assert failure.value.field == f"prefill.{field}"


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
