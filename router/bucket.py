"""A limit per minute, as a token bucket: it holds one minute's worth and fills evenly."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Bucket:
    """What is left of a minute's worth; below zero it is owed, and never more than another minute's worth.

    It has two levels: without what this router has used, and without what all have, as far as is known. Neither may
    run out. So whatever is said of others, this router gives no more than the limit.
    """

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._own = self._all = float(per_minute)
        self._at = clock()

    @property
    def owed(self) -> float:
        """What all have used and what has not come back, from 0 to two minutes' worth."""
        self._fill()
        return self.per_minute - self._all

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0: it is."""
        self._fill()
        return max(0.0, (amount - min(self._own, self._all)) * 60.0 / self.per_minute)

    def use(self, amount: float) -> None:
        """By this router. Negative: gives back."""
        self._fill()
        self._own = self._within(self._own - amount)
        self._all = self._within(self._all - amount)

    def use_elsewhere(self, amount: float) -> None:
        """By another router."""
        self._fill()
        self._all = self._within(self._all - amount)

    def owe(self, amount: float, age_s: float) -> None:
        """At least so much was owed `age_s` ago."""
        self._fill()
        left = self.per_minute - max(0.0, amount - age_s * self.per_minute / 60.0)
        self._all = min(self._all, self._within(left))

    def _within(self, level: float) -> float:
        return min(self.per_minute, max(-self.per_minute, level))

    def _fill(self) -> None:
        now = self._clock()
        more = (now - self._at) * self.per_minute / 60.0
        self._own, self._all, self._at = self._within(self._own + more), self._within(self._all + more), now
