"""Stages of records whose times are known."""

from __future__ import annotations

import pytest

from pdserve.rpc.events import AttemptRecord, HandoffRecord
from router.waterfall import stages


def times(*attempts: AttemptRecord, total: float = 0.0, now: float = 0.0) -> list[tuple[str, float]]:
    """Name and length of each stage; they must follow one another without a gap."""
    found = stages(HandoffRecord(history=attempts, total_ms=total), now)
    at = 0.0
    for stage in found:
        assert stage.start_ms == pytest.approx(at)
        at += stage.ms
    return [(stage.name, round(stage.ms, 6)) for stage in found]


GOOD = AttemptRecord(
    begun_ms=2, admitted_ms=3, queued_ms=5, prefill_ms=20, transfer_ms=4, first_token_ms=40, total_ms=140
)


def test_a_request_that_was_handed_over_has_every_stage() -> None:
    assert times(GOOD, total=142) == [
        ("queued", 10), ("prefill", 20), ("transfer", 4), ("first token", 8), ("decode", 100)
    ]  # fmt: skip


def test_what_the_decode_worker_computes_itself_waits_there_from_the_beginning_and_is_not_transferred() -> None:
    here = AttemptRecord(
        begun_ms=2, admitted_ms=9, queued_ms=8, prefill_ms=20, first_token_ms=40, total_ms=50, placement="decode"
    )
    assert times(here, total=52) == [("queued", 11), ("prefill", 20), ("first token", 11), ("decode", 10)]


def test_what_workers_tell_never_reaches_beyond_the_routers_own_marks() -> None:
    late = AttemptRecord(admitted_ms=3, queued_ms=5, prefill_ms=20, transfer_ms=50, first_token_ms=30, total_ms=60)
    assert times(late, total=60) == [("queued", 8), ("prefill", 20), ("transfer", 2), ("decode", 30)]


def test_a_running_request_shows_as_far_as_it_has_come() -> None:
    placed = AttemptRecord(begun_ms=2)
    admitted = AttemptRecord(begun_ms=2, admitted_ms=3)
    streaming = AttemptRecord(begun_ms=2, admitted_ms=3, first_token_ms=40)
    assert times(now=7) == [("queued", 7)]
    assert times(placed, now=7) == [("queued", 7)]
    assert times(admitted, now=20) == [("queued", 5), ("waiting", 15)]
    assert times(streaming, now=100) == [("queued", 5), ("waiting", 37), ("decode", 58)]


def test_a_failed_attempt_is_lost_and_the_next_one_follows_it() -> None:
    failed = AttemptRecord(begun_ms=1, admitted_ms=4, total_ms=30, outcome="WORKER_LOST", failed_worker="p0")
    refused = AttemptRecord(begun_ms=33, total_ms=5, outcome="QUEUE_FULL", failed_worker="d0")
    second = AttemptRecord(
        begun_ms=40, admitted_ms=2, queued_ms=3, prefill_ms=10, transfer_ms=1, first_token_ms=20, total_ms=60
    )
    assert times(failed, refused, second, total=100) == [
        ("queued", 5), ("lost", 26), ("lost", 7), ("queued", 7), ("prefill", 10), ("transfer", 1),
        ("first token", 4), ("decode", 40),
    ]  # fmt: skip


def test_an_answer_that_broke_off_keeps_what_it_had() -> None:
    first = AttemptRecord(
        admitted_ms=2, queued_ms=1, prefill_ms=5, first_token_ms=10, total_ms=50, failed_worker="d0", outcome="LOST"
    )
    second = AttemptRecord(begun_ms=51, admitted_ms=2, prefill_ms=6, first_token_ms=12, total_ms=20)
    assert times(first, second, total=71) == [
        ("queued", 3), ("prefill", 5), ("first token", 2), ("decode", 40),
        ("queued", 3), ("prefill", 6), ("first token", 4), ("decode", 8),
    ]  # fmt: skip
