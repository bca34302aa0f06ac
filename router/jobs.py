"""What this router has given the workers, which corrects the loads that they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.registry.records import PREFILL, Load
from router.gate import Member


@dataclass(eq=False)
class Job:
    """This router's own work on one worker; `pool.begin` starts it, `pool.end` ends it."""

    member: Member
    prompt_tokens: int  # at a decode worker not 0 only for a prompt that it computes itself, which is a job of its own
    pages: int
    started: float
    ended: float | None = None
    streams: int = 1  # at a decode worker, of a job that is not a prompt
    tenant: str = ""


def corrected(load: Load, jobs: Sequence[Job], renewed_at: float, role: str) -> Load:
    """The reported load, less our jobs ended since the report, and then plus those begun since.

    In this order: the report may know nothing of a job that ended, but no such job hides a new one.
    """
    begun = [job for job in jobs if job.started >= renewed_at and job.ended is None]
    ended = [job for job in jobs if job.started < renewed_at and job.ended is not None]

    def moved(reported: int, size: Callable[[Job], int]) -> int:
        return max(0, reported - sum(map(size, ended))) + sum(map(size, begun))

    held = moved(load.pages_held, lambda job: job.pages)
    prompts = moved(load.queued_prefill_tokens, lambda job: job.prompt_tokens)
    if role == PREFILL:
        queued = moved(load.queued_tokens, lambda job: job.prompt_tokens)
        waiting = moved(load.waiting, lambda job: 1)
        return replace(load, waiting=waiting, queued_tokens=queued, queued_prefill_tokens=prompts, pages_held=held)
    running = moved(load.running, lambda job: 0 if job.prompt_tokens else job.streams)
    return replace(load, running=running, queued_prefill_tokens=prompts, pages_held=held)
