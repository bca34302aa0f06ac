"""What an overload came to."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.completions import percentile
from benchmarks.report import Figure
from benchmarks.workloads import Phase

RATIO_GOAL, RECOVERY_GOAL_S, OTHERS_GOAL = 1.5, 10.0, 0.95
FLOOD, *OTHERS = TENANTS = ("amber", "birch", "cedar")
TOO_MANY = 429


@dataclass(frozen=True)
class Measured:
    capacity: float  # requests per second
    at_capacity: Phase
    overload: Phase
    after: Phase  # begins when the flood ends

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.at_capacity, self.overload, self.after

    @property
    def recovered_s(self) -> float:
        """Seconds from the end of the flood to the last request that was still refused, or late."""
        limit_s = RATIO_GOAL * percentile(self.at_capacity.first_tokens(), 0.99)
        began = self.overload.end
        bad = [o.sent - began for o in self.after.outcomes if not o.completed or o.first_token_s > limit_s]
        return max(bad, default=0.0)


def figures_of(seen: Measured, quick: bool = False) -> list[Figure]:
    """`quick`: too few requests to judge their times by."""
    flood = seen.overload
    taken = [outcome for outcome in flood.outcomes if outcome.completed]
    refused = [outcome for outcome in flood.outcomes if outcome.status == TOO_MANY]
    failed = [o for phase in seen.phases for o in phase.failures if o.status != TOO_MANY]
    offered = len(flood.outcomes) / seen.capacity / (flood.end - flood.begin + _skipped(flood))
    served = sum(flood.begin <= outcome.sent <= flood.end for outcome in taken) / (flood.end - flood.begin)
    figures = [
        Figure("capacity", seen.capacity, "requests/s"),
        Figure("at capacity: refused", _refused(seen.at_capacity), "share"),
        Figure("overload: offered", offered, "capacities"),
        Figure("overload: served", served, "requests/s", peer=seen.capacity),
        Figure("overload: refused, of all", _refused(flood), "share"),
        Figure("overload: refused, of the tenant that floods", _refused(flood, FLOOD), "share"),
    ]
    for name in OTHERS:
        share = 1 - _refused(flood, name)
        figures.append(Figure(f"overload: taken, of {name}'s requests", share, "share", goal=OTHERS_GOAL))
    hints = sum(outcome.retry_after_s > 0 for outcome in refused) / max(1, len(refused))
    figures += [
        Figure("refusals that say when to come again", hints, "share", goal=1.0),
        Figure("requests that failed otherwise", len(failed), "requests", goal=0, at_most=True),
    ]
    return figures + times(seen, None if quick else RATIO_GOAL)


def _skipped(phase: Phase) -> float:
    """Seconds at the beginning of a phase that are not counted."""
    return phase.begin - min(outcome.sent for outcome in phase.outcomes)


def _refused(phase: Phase, tenant: str = "") -> float:
    mine = phase.of(tenant)
    return sum(outcome.status == TOO_MANY for outcome in mine) / max(1, len(mine))


def times(seen: Measured, ratio_goal: float | None) -> list[Figure]:
    figures = []
    for share in (50, 99):
        goal = ratio_goal if share == 99 else None
        for what, of in (("time to first token", Phase.first_tokens), ("time between tokens", all_gaps)):
            before, under = percentile(of(seen.at_capacity), share / 100), percentile(of(seen.overload), share / 100)
            figures.append(Figure(f"at capacity: {what} p{share}", before, "s"))
            figures.append(Figure(f"overload: {what} p{share}", under, "s", peer=before, goal=goal, at_most=True))
    for name in TENANTS:
        if mine := seen.overload.first_tokens(name):
            figures.append(Figure(f"overload: time to first token p99 of {name}", percentile(mine, 0.99), "s"))
    recovered = Figure("recovered after the flood", seen.recovered_s, "s", goal=RECOVERY_GOAL_S, at_most=True)
    return [*figures, recovered]


def all_gaps(phase: Phase) -> list[float]:
    return [gap for tenant in TENANTS for gap in phase.gaps(tenant)]
