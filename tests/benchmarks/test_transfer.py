"""The transfer benchmark really moves pages: it compares them before it reports."""

from __future__ import annotations

import pytest

from benchmarks.transfer import GOAL, SHARED_GOAL, VERIFICATION_GOAL, run
from benchmarks.transfer_cases import Case


@pytest.mark.slow
@pytest.mark.parametrize("take_order", ["hnd", "nhd"])
def test_transfer_reports_a_verified_figure(take_order: str) -> None:
    case = Case("tiny", layers=2, heads=2, head_dim=16, tokens=70, take_order=take_order, take_page_size=32)
    stream, shared, *tuned, cpu, wall = run(case, repeats=1, verification=True)
    assert all(figure.goal is None for figure in tuned)
    for figure, goal in ((stream, GOAL), (shared, SHARED_GOAL)):
        assert figure.value > 0
        assert figure.peer is not None
        assert figure.peer > 0
        assert (figure.unit, figure.goal) == ("GB/s", goal)
    assert 0 < cpu.value < 1 and wall.value < 1
    assert all(share.goal == VERIFICATION_GOAL and share.at_most for share in (cpu, wall))
