"""What each tenant was given lately: amounts that fade, so that a moment's crowd counts less than who keeps coming."""

from __future__ import annotations

import math
import time

from router.bucket import Clock

_NOTHING = 1e-6  # of the whole: a tenant with less is forgotten


class Lately:
    """Of one worker. Mutable; bounded by the tenants that there are.

    Args:
        fade_s: after which an amount counts for 1/e.
    """

    def __init__(self, fade_s: float, clock: Clock = time.monotonic) -> None:
        self._fade_s = fade_s
        self._clock = clock
        self._amounts: dict[str, float] = {}  # as they were at `_at`
        self._at = clock()

    def give(self, tenant: str, amount: float) -> None:
        now = self._clock()
        left = math.exp((self._at - now) / self._fade_s)
        self._at = now
        least = _NOTHING * sum(self._amounts.values()) * left
        self._amounts = {name: each * left for name, each in self._amounts.items() if each * left > least}
        self._amounts[tenant] = self._amounts.get(tenant, 0.0) + amount

    def part(self, tenant: str) -> float:
        """Of 1 together; 0 for one that was given nothing."""
        mine = self._amounts.get(tenant, 0.0)  # all fade alike, so their parts do not
        return mine / sum(self._amounts.values()) if mine else 0.0
