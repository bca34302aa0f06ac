"""The page of results: figures as tables, and no figure where none was measured. Plots are well-formed."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.growth import Point, exponent, rise
from benchmarks.page import TEMPLATE, page
from benchmarks.plot import Axis, Line, save
from benchmarks.report import Figure


def test_tables_show_figures_by_prefix_with_wins_and_losses(tmp_path: Path) -> None:
    figures = [
        Figure("decode, batch 1", 3.0, "tokens/s", peer=2.0, goal=1.2),
        Figure("decode, batch 8", 1234.0, "tokens/s", peer=2000.0, goal=1.2),
        Figure("prefill", 5.0, "tokens/s", goal=1.0, relative=True),
    ]
    (tmp_path / "engine.json").write_text(json.dumps([figure.to_json() for figure in figures]))
    text = page("{{table engine.json: decode}}\n\n{{table none.json}}\n\n{{verdicts}}", tmp_path)
    assert "| batch 1 | 3 tokens/s | 2 | 1.50 | 1.2 | met |" in text
    assert "| batch 8 | 1,234 tokens/s | 2,000 | 0.62 | 1.2 | **missed** |" in text
    assert "prefill" not in text
    assert "Not measured in this run (none.json)" in text
    assert "- `engine`: 1 of 2 goals met; missed: decode, batch 8" in text


def test_the_template_leaves_no_mark_unfilled(tmp_path: Path) -> None:
    assert "{{" not in page(TEMPLATE.read_text(), tmp_path)


def test_a_page_of_what_was_measured_leaves_the_other_sections_out(tmp_path: Path) -> None:
    row = {"name": "one", "value": 1.0, "unit": "", "peer": None, "ratio": None, "goal": None, "met": None}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    sections = (
        "# Top",
        "## A",
        "{{table a.json}}",
        "## B",
        "{{table a.json: two}}",
        "## C",
        "{{table c.json}}",
        "## D",
    )
    made = page("\n\n".join((*sections, "words\n")), tmp_path, measured=True)
    assert [line for line in made.splitlines() if line.startswith("#")] == ["# Top", "## A", "## D"]
    assert "one" in made and "Not measured" not in made


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_its_own(power: float) -> None:
    assert exponent([(x, 3 * x**power) for x in (1, 2, 4, 16)]) == pytest.approx(power)


def test_growth_faster_than_the_bound_is_seen_and_fixed_costs_are_not_held_against_it() -> None:
    assert rise([Point(x, x * x, x) for x in (1.0, 2.0, 4.0, 8.0)]) == pytest.approx(8.0)
    assert rise([Point(x, x + 5, x) for x in (1.0, 2.0, 4.0, 8.0)]) < 1


def test_a_plot_is_an_image_with_its_labels(tmp_path: Path) -> None:
    lines = [Line("measured <ms>", [(1, 2), (10, 30), (100, 250)]), Line("bound", [(1, 1), (100, 200)], dashed=True)]
    save(tmp_path / "plot.svg", "time", Axis("tokens"), Axis("ms"), lines)
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"time", "tokens", "ms", "measured <ms>", "bound", "1", "10", "100"} <= texts
