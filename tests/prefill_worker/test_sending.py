"""How fast caches leave a worker, from reports whose figures we chose."""

from __future__ import annotations

import pytest

from cache_transfer.sender import SendReport
from prefill_worker.sending import SendRate


def report(payload_bytes: int, sending_s: float) -> SendReport:
    return SendReport(1, payload_bytes, 1, granted_at=0.0, ack_at=100.0, sending_s=sending_s)


def test_bytes_over_the_time_of_sending_them_and_the_last_handoffs_count_most() -> None:
    rate = SendRate()
    assert rate.bytes_per_s == 0
    rate.observe(report(3000, 0.5))
    assert rate.bytes_per_s == pytest.approx(6000)  # not over the 100 s between grant and acknowledgement
    rate.observe(report(1000, 0.5))
    assert rate.bytes_per_s == pytest.approx((0.9 * 3000 + 1000) / (0.9 * 0.5 + 0.5))
    for _ in range(100):
        rate.observe(report(1000, 0.5))
    assert rate.bytes_per_s == pytest.approx(2000, rel=0.01)


def test_a_handoff_without_a_cache_says_nothing() -> None:
    rate = SendRate()
    rate.observe(report(0, 0.0))
    rate.observe(report(0, 0.5))
    assert rate.bytes_per_s == 0
