"""A scheduler alone, whose steps a test books."""

from __future__ import annotations

import math

from pdserve.engine.blocks import BlockManager
from pdserve.engine.plan import StepPlan
from pdserve.engine.prefix import Prefix
from prefill_worker.scheduler import Prompt, Scheduler


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
