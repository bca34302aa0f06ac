"""A request's record as stages, one after the other. Pure.

    queued       received .. prefill begins: checks, placement, admission, the prefill worker's queue
    prefill      prompt computed
    transfer     what of the cache's way prefill did not hide
    first token  .. first token at the router
    decode       .. end
    waiting      admitted .. first token, while no worker has told what it did in that time
    lost         an attempt that ended without a token, from its prefill on

When a stage begins and ends, the router's clock says; how long prefill and transfer took, the worker's own. They are
only ever durations: two machines' clocks are never compared. What a worker took is cut to the time between the
router's own two marks, as its last word may come later than the first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.rpc.events import AttemptRecord, HandoffRecord

QUEUED, PREFILL, TRANSFER, FIRST_TOKEN, DECODE = ORDER = ("queued", "prefill", "transfer", "first token", "decode")
WAITING, LOST = "waiting", "lost"


@dataclass(frozen=True)
class Stage:
    """Milliseconds since the request was received."""

    name: str
    start_ms: float
    ms: float
    attempt: int = 0  # in the record's history


def stages(record: HandoffRecord, now_ms: float = 0.0) -> tuple[Stage, ...]:
    """In order, without gaps; those that took no time are left out.

    Args:
        now_ms: age of a request that still runs; a record of one that has ended says itself how long it took.
    """
    end_ms = record.total_ms or now_ms
    if not record.history:
        return (Stage(QUEUED, 0.0, end_ms),) if end_ms > 0 else ()
    found: list[Stage] = []
    at = 0.0
    for number, attempt in enumerate(record.history):
        last = number + 1 == len(record.history)
        until = end_ms if last else attempt.begun_ms + attempt.total_ms
        for name, mark in _marks(attempt, until):
            if mark > at:
                found.append(Stage(name, at, mark - at, number))
                at = mark
    return tuple(found)


def _marks(attempt: AttemptRecord, until: float) -> Iterator[tuple[str, float]]:
    """Each stage's name and end."""
    begun = attempt.begun_ms
    if not attempt.admitted_ms:  # refused, or not yet admitted
        yield LOST if attempt.failed_worker else QUEUED, until
        return
    admitted = begun + attempt.admitted_ms
    first = begun + attempt.first_token_ms if attempt.first_token_ms else until
    told = attempt.queued_ms or attempt.prefill_ms or attempt.transfer_ms
    if told:
        at = admitted
        for name, ms in ((QUEUED, attempt.queued_ms), (PREFILL, attempt.prefill_ms), (TRANSFER, attempt.transfer_ms)):
            at = min(first, at + ms)
            yield name, at
    else:
        yield QUEUED, min(first, admitted)
    if attempt.first_token_ms:
        yield FIRST_TOKEN if told else WAITING, first
        yield DECODE, until
    else:
        yield LOST if attempt.failed_worker else WAITING, until
