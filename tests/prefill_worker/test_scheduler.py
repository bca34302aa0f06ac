"""The scheduler alone: plans, pages and states, with a clock that the test owns."""

from __future__ import annotations

import pytest

from pdserve.engine.rate import StepCost
from pdserve.errors import ConfigError, Exhausted
from prefill_worker.scheduler import State
from prefill_worker.settings import PrefillSettings
from tests.prefill_worker.scheduling import book, empty, made, scheduler, sizes


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
