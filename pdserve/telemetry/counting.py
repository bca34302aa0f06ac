"""Counting where things happen: plain numbers that one event loop owns, without a lock or an object per event.

They become metrics when somebody asks for them (metrics.py). Label values may come from peers, so every family has a
bound: what would be one series too many counts as OTHER.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from pdserve.errors import Cancelled, Exhausted, Incompatible, Internal, PdserveError, Refused, Unavailable

MAX_SERIES = 200
OTHER = "other"

# Finer where people look: a first token within a second, the next ones within a tenth of it.
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Labels = tuple[str, ...]
V = TypeVar("V")

# Errors that the state of this system causes name fields that we chose; those of others may be a caller's own words.
_OWN_FIELDS = (Exhausted, Unavailable, Incompatible, Refused, Internal)


class Counts:
    """A number that only grows for each combination of label values.

    Args:
        known: combinations that are told from the start, with 0.
    """

    def __init__(self, *labels: str, known: Iterable[Labels] = ()) -> None:
        self.labels = labels
        self.values: dict[Labels, float] = dict.fromkeys(known, 0)

    def add(self, *values: str, by: float = 1) -> None:
        values = _bounded(self.values, values)
        self.values[values] = self.values.get(values, 0) + by


class Refusals(Counts):
    """Requests that were told no, by the error's reason and field."""

    def __init__(self) -> None:
        super().__init__("reason", "field")

    def count(self, error: PdserveError) -> None:
        self.add(error.reason, error.field if isinstance(error, _OWN_FIELDS) else "")

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is raised inside, and lets it pass. Who has gone away was not refused."""
        try:
            yield
        except Cancelled:
            raise
        except PdserveError as error:
            self.count(error)
            raise


class Histogram:
    """How many observations fell up to each bound, and their sum.

    Args:
        bounds: upper ones, ascending; what lies above the last is counted too.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Histograms:
    """A histogram for each combination of label values."""

    def __init__(self, bounds: Sequence[float], *labels: str) -> None:
        self.labels = labels
        self.values: dict[Labels, Histogram] = {}
        self._bounds = bounds

    def of(self, *values: str) -> Histogram:
        """Keep it: the one of a request does not change."""
        values = _bounded(self.values, values)
        found = self.values.get(values)
        if found is None:
            found = self.values[values] = Histogram(self._bounds)
        return found


def _bounded(known: Mapping[Labels, V], values: Labels) -> Labels:
    """The labels themselves, or OTHER for all of them when there are enough."""
    return values if values in known or len(known) < MAX_SERIES else (OTHER,) * len(values)
