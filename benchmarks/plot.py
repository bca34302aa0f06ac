"""A line plot as an SVG file. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 560, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = ("#1f5fa8", "#b3541e", "#3a7d44", "#7a4b94", "#5c5c5c")


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Of positive numbers; logarithmic unless told otherwise."""

    label: str
    log: bool = True


class _Scale:
    """Numbers -> pixels, with ticks."""

    def __init__(self, values: Sequence[float], axis: Axis, begin: float, end: float) -> None:
        self._log, self._begin, self._end = axis.log, begin, end
        low, high = (min(values), max(values)) if axis.log else (0.0, max(values))
        self._low, self._high = self._unit(low), self._unit(high)
        if self._high == self._low:
            self._high += 1
        self.ticks = self._log_ticks(low, high) if axis.log else [high * part / 4 for part in range(5)]

    def __call__(self, value: float) -> float:
        share = (self._unit(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def _unit(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def _log_ticks(self, low: float, high: float) -> list[float]:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        made = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        return [tick for tick in made if low * 0.999 <= tick <= high * 1.001]


def save(path: Path, title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> None:
    """Needs at least one point."""
    xs = _Scale([at for line in lines for at, _ in line.points], x, LEFT, WIDTH - RIGHT)
    ys = _Scale([value for line in lines for _, value in line.points], y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle", 14),
        *(_grid(xs(tick), True, _number(tick)) for tick in xs.ticks),
        *(_grid(ys(tick), False, _number(tick)) for tick in ys.ticks),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x.label, "middle"),
        f'<g transform="rotate(-90 16 {HEIGHT / 2:g})">{_text(16, HEIGHT / 2, y.label, "middle")}</g>',
    ]
    for number, line in enumerate(lines):
        parts += _drawn(
            line, [(xs(at), ys(value)) for at, value in line.points], COLOURS[number % len(COLOURS)], number
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _drawn(line: Line, points: Sequence[tuple[float, float]], colour: str, number: int) -> list[str]:
    joined = " ".join(f"{at:.1f},{value:.1f}" for at, value in points)
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    at = TOP + 14 + 16 * number
    style = f'stroke="{colour}" stroke-width="2"{dashes}'
    key = f'<line x1="{LEFT + 8}" x2="{LEFT + 32}" y1="{at - 4}" y2="{at - 4}" {style}/>'
    curve = f'<polyline points="{joined}" fill="none" {style}/>'
    dots = [] if line.dashed else [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [curve, *dots, key, _text(LEFT + 38, at, line.label)]


def _grid(at: float, vertical: bool, label: str) -> str:
    if vertical:
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>'
        return line + _text(at, HEIGHT - BOTTOM + 16, label, "middle")
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
    return line + _text(LEFT - 6, at + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1e6 else f"{value:.0e}"
