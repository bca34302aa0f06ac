"""Every benchmark's command works, says what it measured in the agreed form, and compares with a real peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Figure

ROOT = Path(__file__).parents[2]
KEYS = {"name", "value", "unit", "peer", "ratio", "goal", "met"}


def figures_of(name: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    figures: list[dict[str, Any]] = json.loads(file.read_text())
    for figure in figures:
        assert figure["name"] in done.stdout
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "compared"),
    [
        ("engine", 11, 6),
        ("growth", 11, 5),
        ("handoff", 9, 2),
        ("interference", 12, 9),
        ("memory", 6, 4),
        ("registry", 22, 3),
        ("router", 9, 2),
        ("serving", 25, 1),
        ("startup", 1, 0),
    ],
)
def test_a_quick_run_gives_figures(name: str, count: int, compared: int, tmp_path: Path) -> None:
    figures = figures_of(name, tmp_path)
    assert len(figures) == count
    assert sum(figure["peer"] is not None for figure in figures) == compared
    for figure in figures:
        assert figure.keys() == KEYS
        assert figure["unit"] and (figure["value"] >= 0 or figure["unit"] == "exponent")
        if figure["peer"] is not None:
            assert figure["ratio"] == pytest.approx(figure["value"] / figure["peer"])
            assert isinstance(figure["met"], bool) is (figure["goal"] is not None)
    if name == "memory":  # exact, unlike what depends on a heap or on the machine's load
        held = [figure for figure in figures if "live tensors" in figure["name"]]
        assert len(held) == 2 and all(figure["met"] for figure in held), held


@pytest.mark.parametrize(
    ("figure", "ratio", "met"),
    [
        (Figure("f", 3.0, "x", peer=2.0, goal=1.5), 1.5, True),
        (Figure("f", 2.9, "x", peer=2.0, goal=1.5), 1.45, False),
        (Figure("f", 3.0, "x", peer=2.0, goal=1.5, at_most=True), 1.5, True),
        (Figure("f", 3.1, "x", peer=2.0, goal=1.5, at_most=True), 1.55, False),
        (Figure("f", 7.0, "x", goal=6.0), None, True),
        (Figure("f", 3.0, "x"), None, None),
    ],
)
def test_a_figure_judges_its_ratio_or_its_value(figure: Figure, ratio: float | None, met: bool | None) -> None:
    made = figure.to_json()
    assert made.keys() == KEYS
    assert (made["ratio"], made["met"]) == (pytest.approx(ratio) if ratio else None, met)
