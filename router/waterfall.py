"""A request's record as stages, one after the other. Pure.

    queued       received .. prefill begins: checks, placement, admission, the prefill worker's queue
    prefill      prompt computed
    transfer     what of the cache's way prefill did not hide
    first token  .. first token at the router
    decode       .. end
    waiting      admitted .. first token, while no worker has told what it did in that time
    lost         an attempt that ended without a token, from its prefill on

An attempt's beginning and its first token are the router's marks. How long prefill and transfer took, and how long the
prompt waited for them, workers measured: durations only, as two machines' clocks are never compared. They are laid
between the router's marks, prefill first, then waiting, then transfer; what is left there is the first token's. The
last word of a transfer may come after that token: what does not fit between the marks is cut.
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
    first = begun + (attempt.first_token_ms or until - begun)
    if not (attempt.queued_ms or attempt.prefill_ms or attempt.transfer_ms):  # no worker's word
        yield QUEUED, begun + min(attempt.admitted_ms, first - begun)
        yield WAITING if attempt.first_token_ms or not attempt.failed_worker else LOST, first
    else:
        left = first - begun
        prefill = min(left, attempt.prefill_ms)
        # At a decode worker that computes it itself a prompt waits from the beginning, elsewhere once it is admitted.
        admitted_ms, queued_ms = attempt.admitted_ms, attempt.queued_ms
        queued = max(admitted_ms, queued_ms) if attempt.placement == "decode" else admitted_ms + queued_ms
        queued = min(left - prefill, queued)
        transfer = min(left - prefill - queued, attempt.transfer_ms)
        at = begun
        for name, ms in ((QUEUED, queued), (PREFILL, prefill), (TRANSFER, transfer)):
            at += ms
            yield name, at
        yield FIRST_TOKEN if attempt.first_token_ms or not attempt.failed_worker else LOST, first
    if attempt.first_token_ms:
        yield DECODE, until
