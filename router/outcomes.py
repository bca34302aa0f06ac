"""Where prompts were computed since this router started, and how well their first tokens were foreseen."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from router.gate import Pair
from router.settings import ALWAYS, AUTO
from router.traffic import Traffic

BOUNDS = (0.5, 0.8, 1.25, 2.0)
"""Of the time to the first token over the predicted one; equal steps up and down."""


@dataclass
class Outcomes:
    """Fields as in the wire schema's PlacementCounts; `traffic`: what else is counted. Belongs to one event loop."""

    disaggregate: str = ALWAYS
    handed_over: int = 0
    computed_at_decode: int = 0
    fallbacks: int = 0
    cheaper: int = 0
    split: int = 0
    ratios: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    ratio_sum: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def predictions(self) -> int:
        return sum(self.ratios)

    def begun(self, pair: Pair) -> None:
        """An attempt at this pair."""
        if not pair.here:
            self.handed_over += 1
            self.split += pair.split
            return
        self.computed_at_decode += 1
        if self.disaggregate == AUTO:
            forced = pair.choice.reason in ("only", "refused")
            self.fallbacks += forced
            self.cheaper += not forced

    def first_token(self, pair: Pair, seconds: float) -> None:
        """It came so long after the pair was chosen. Guesses do not count."""
        if pair.choice.measured and pair.predicted_s > 0:
            ratio = seconds / pair.predicted_s
            self.ratios[bisect_left(BOUNDS, ratio)] += 1
            self.ratio_sum += ratio
