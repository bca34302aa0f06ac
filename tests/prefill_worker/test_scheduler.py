"""The scheduler alone: plans, pages and states, with a clock that the test owns."""

from __future__ import annotations

import pytest

from pdserve.engine.blocks import BlockManager, Prefix
from pdserve.engine.plan import StepPlan
from pdserve.errors import ConfigError, Exhausted
from prefill_worker.scheduler import Prompt, Scheduler, State
from prefill_worker.settings import PrefillSettings


def scheduler(pages: int = 64, chunk_tokens: int = 16, max_queue: int = 8, max_running: int = 4) -> Scheduler:
    return Scheduler(
        BlockManager(pages, 4),
        page_size=4,
        chunk_tokens=chunk_tokens,
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


def test_the_oldest_prompt_has_half_a_step_and_short_ones_go_first() -> None:
    s = scheduler()
    for prompt in (made("long", 40), made("short", 3, first=100), made("other", 40, first=200)):
        s.submit(prompt)
    s.admit(0.0)
    assert sizes(s) == {"long": 8, "short": 3, "other": 5}
    assert sizes(s) == {"long": 8, "other": 8}


def test_what_is_left_over_goes_to_those_who_can_use_it() -> None:
    s = scheduler()
    for prompt in (made("a", 2), made("b", 1, first=50), made("c", 40, first=100)):
        s.submit(prompt)
    s.admit(0.0)
    assert sizes(s) == {"a": 2, "b": 1, "c": 13}
    assert sizes(s) == {"c": 16}


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
    assert steps == -(-sum(len(p.ids) for p in prompts) // 9)
    assert all(p.state is State.COMMITTED for p in prompts)


def test_a_full_queue_refuses() -> None:
    s = scheduler(max_queue=1)
    s.submit(made("a", 4))
    refused = made("b", 4)
    with pytest.raises(Exhausted) as failure:
        s.submit(refused, retry_after_ms=7)
    assert (failure.value.reason, failure.value.retry_after_ms) == ("QUEUE_FULL", 7)
    assert refused.state is State.REFUSED and len(s.waiting) == 1


def test_prompts_wait_in_order_for_pages_and_for_a_place() -> None:
    s = scheduler(pages=6, max_running=2)
    first, large, small = made("first", 12), made("large", 20, first=50), made("small", 4, first=90)
    for prompt in (first, large, small):
        s.submit(prompt)
    assert s.admit(0.0) == [first]  # large does not fit, and small does not overtake it
    assert s.blocks.holdings().keys() == {"first"}  # nothing half taken
    s.release(first, State.ABORTED)
    assert s.admit(0.0) == [large, small]
    for prompt in (large, small):
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
        ("chunk_tokens", 15),
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
    s.admit(0.0)
    s.submit(head)
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
