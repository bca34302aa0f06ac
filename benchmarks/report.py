"""How every benchmark reports: one object per figure, as a table and as JSON.

{"name", "value", "unit", "peer", "ratio", "goal", "met"}
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured value beside what it is compared with.

    Args:
        peer: the other side's value, in the same unit; None when there is none.
        goal: for the ratio value / peer, or for the value itself without a peer; None: only printed.
        at_most: the goal is an upper bound, not a lower one.
        relative: the goal is for the ratio only, so that nothing is judged where the peer is missing.
    """

    name: str
    value: float
    unit: str
    peer: float | None = None
    goal: float | None = None
    at_most: bool = False
    relative: bool = False

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.value / self.peer

    @property
    def met(self) -> bool | None:
        """None when there is no goal, or no peer to judge it by."""
        if self.goal is None or (self.relative and self.peer is None):
            return None
        measured = self.value if self.ratio is None else self.ratio
        return measured <= self.goal if self.at_most else measured >= self.goal

    def to_json(self) -> dict[str, object]:
        fields = {name: value for name, value in asdict(self).items() if name not in ("at_most", "relative")}
        return {**fields, "ratio": self.ratio, "met": self.met}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The two options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs, for a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def report(figures: Sequence[Figure], path: Path | None) -> None:
    """Prints the table; writes the JSON when `path` is given."""
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        print(f"{figure.name:{width}}  {_row(figure)}")
    if path is not None:
        path.write_text(json.dumps([figure.to_json() for figure in figures], indent=2) + "\n")


def _row(figure: Figure) -> str:
    text = f"{figure.value:12,.4g} {figure.unit}"
    if figure.ratio is not None:
        text += f"   peer {figure.peer:,.4g}   ratio {figure.ratio:.2f}"
    if figure.goal is not None:
        verdict = {True: "met", False: "MISSED", None: "no peer"}[figure.met]
        text += f"   goal {'<=' if figure.at_most else '>='} {figure.goal:g}   {verdict}"
    return text
