"""Figures: ratio, goal and the JSON that other tools read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Figure, report


@pytest.mark.parametrize(
    ("figure", "ratio", "met"),
    [
        (Figure("a", 2.0, "x", 4.0, 0.5), 0.5, True),
        (Figure("a", 1.9, "x", 4.0, 0.5), 0.475, False),
        (Figure("a", 3.0, "x", 2.0, 1.5, at_most=True), 1.5, True),
        (Figure("a", 3.1, "x", 2.0, 1.5, at_most=True), 1.55, False),
        (Figure("a", 3.0, "x", goal=3.0), None, True),
        (Figure("a", 3.0, "x"), None, None),
    ],
)
def test_goals_judge_the_ratio(figure: Figure, ratio: float | None, met: bool | None) -> None:
    assert figure.ratio == (None if ratio is None else pytest.approx(ratio))
    assert figure.met is met


def test_reports_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    report([Figure("copy", 1.0, "GB/s", 4.0, 0.5), Figure("pages", 7.0, "pages")], path)
    first, second = json.loads(path.read_text())
    assert first == {
        "name": "copy",
        "value": 1.0,
        "unit": "GB/s",
        "peer": 4.0,
        "ratio": 0.25,
        "goal": 0.5,
        "met": False,
    }
    assert (second["peer"], second["ratio"], second["met"]) == (None, None, None)
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "7 pages" in printed
