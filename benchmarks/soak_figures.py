"""What a soak came to: its figures, and a summary for people."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.report import Figure
from benchmarks.soak_adapters import Changes
from benchmarks.soak_house import House
from benchmarks.soak_traffic import COMPLETE, DIFFERENT, FAILED, LEFT, REFUSED, UNTYPED, Outcome
from benchmarks.soak_watch import MIB, Watch
from cache_transfer.rings import MAX_IDLE

COMPLETE_GOAL = 0.95
RING_DESCRIPTORS = 2  # the memory's own, and that of its mapping
MORE = 4  # descriptors, threads or tasks that a process may have gained
MAX_SHOWN = 8


@dataclass(frozen=True)
class Rest:
    """A moment at which nothing should be held."""

    at: float
    pages: int  # still held
    waited_s: float
    faults: tuple[str, ...]
    tasks: dict[str, int]  # of the event loop, by life
    rings: dict[str, int]  # descriptors of rings of shared memory, by life


@dataclass
class Soak:
    """All that was seen."""

    outcomes: list[Outcome] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    def count(self, *ends: str) -> int:
        return sum(outcome.end in ends for outcome in self.outcomes)


def figures_of(seen: Soak, watch: Watch, house: House, changes: Changes) -> list[Figure]:
    asked = seen.count(COMPLETE, FAILED, DIFFERENT)
    failures = [outcome for outcome in seen.outcomes if outcome.end == FAILED]
    untyped = sum(outcome.reason == UNTYPED for outcome in failures)
    per_minute = 60 * sum(outcome.began >= seen.began for outcome in seen.outcomes) / (seen.ended - seen.began)
    most_rings = max((count for each in seen.rests for count in each.rings.values()), default=0) // RING_DESCRIPTORS
    figures = [
        Figure("requests", len(seen.outcomes), "requests"),
        Figure("requests per minute", per_minute, "per minute"),
        Figure("complete, of those that were to complete", seen.count(COMPLETE) / asked, "share", goal=COMPLETE_GOAL),
        Figure("left early by callers, as far as they came right", seen.count(LEFT), "requests"),
        Figure("refused as due", seen.count(REFUSED), "requests"),
        Figure("failed", len(failures), "requests"),
        Figure("failed without a typed error", untyped, "requests", goal=0, at_most=True),
        Figure("answers that differ from one process", seen.count(DIFFERENT), "requests", goal=0, at_most=True),
        Figure("tokens checked", sum(outcome.tokens for outcome in seen.outcomes), "tokens"),
        Figure("kills", len(house.kills), "kills"),
        Figure("slowest victim to be ready again", max((k.ready_after_s for k in house.kills), default=0.0), "s"),
        Figure("workers that ended unasked", len(house.unasked), "workers", goal=0, at_most=True),
        Figure("changes of adapters", changes.done, "changes"),
        Figure("pages held at a rest", max(each.pages for each in seen.rests), "pages", goal=0, at_most=True),
        Figure("books that do not agree", sum(len(r.faults) for r in seen.rests), "workers", goal=0, at_most=True),
        Figure("most idle rings at a rest", most_rings, "rings", goal=MAX_IDLE, at_most=True),
        Figure("longest wait for a rest", max(each.waited_s for each in seen.rests), "s"),
    ]
    figures += [Figure(f"failed: {reason}", count, "requests") for reason, count in reasons(failures).items()]
    return figures + growths(seen, watch)


def reasons(failures: Sequence[Outcome]) -> Counter[str]:
    return Counter(outcome.reason for outcome in failures)


def growths(seen: Soak, watch: Watch) -> list[Figure]:
    """Of the router, and the worst of the workers that lived long enough."""
    figures = []
    for title, mine in (("router", True), ("workers", False)):
        lives = [life for life in watch.samples if life.startswith("router") is mine]
        grown = [found for life in lives if (found := watch.grown(life)) is not None]
        figures.append(Figure(f"{title}: lives long enough to judge", len(grown), "processes"))
        if grown:
            worst = max(grown, key=lambda each: each.in_ten_minutes)
            figures += [
                Figure(f"{title}: memory", worst.level / MIB, "MiB"),
                Figure(f"{title}: growth of memory", worst.slope / MIB, "MiB/min"),
                Figure(f"{title}: its bound (95 %)", worst.bound / MIB, "MiB/min"),
                Figure(f"{title}: of that life, seen for", worst.minutes, "min"),
                Figure(
                    f"{title}: sure growth in ten minutes, or in a shorter life",
                    worst.in_ten_minutes,
                    "share",
                    goal=0.02,
                    at_most=True,
                ),
            ]
        gained = [each for life in lives if (each := watch.gained(life)) is not None]
        for name in ("descriptors", "threads"):
            most = max((getattr(each, name) for life in lives for each in watch.samples[life]), default=0)
            figures.append(Figure(f"{title}: most {name}", most, name))
            if gained:
                more = max(getattr(each, name) for each in gained)
                figures.append(Figure(f"{title}: more {name} since the warm-up", more, name, goal=MORE, at_most=True))
        more_tasks = [more for life in lives if (more := _more_tasks(seen.rests, life)) is not None]
        if more_tasks:
            name = f"{title}: more tasks at the last rest"
            figures.append(Figure(name, max(more_tasks), "tasks", goal=MORE, at_most=True))
    return figures


def _more_tasks(rests: Sequence[Rest], life: str) -> int | None:
    """At the last rest that a process saw than at its first one after the warm-up; None where it saw too few."""
    mine = [each.tasks[life] for each in rests[1:] if life in each.tasks]
    return mine[-1] - mine[0] if len(mine) > 1 else None


def summary(seen: Soak, watch: Watch, house: House, changes: Changes) -> None:
    """What a reader wants to know besides the figures, on standard error."""
    kinds = Counter((outcome.kind, outcome.end) for outcome in seen.outcomes)
    for (kind, end), count in sorted(kinds.items()):
        print(f"{kind:14} {end:14} {count:6}", file=sys.stderr)
    for way in sorted({kill.way for kill in house.kills}):
        took = [kill.ready_after_s for kill in house.kills if kill.way == way]
        print(f"{way}: {len(took)}, ready again after {statistics.median(took):.1f} s (median)", file=sys.stderr)
    for life in sorted(watch.samples):
        if (gained := watch.gained(life)) is not None and gained.kinds:
            print(f"{life} has more: {', '.join(f'{n} {kind}' for kind, n in gained.kinds.items())}", file=sys.stderr)
    wrong = [outcome for outcome in seen.outcomes if outcome.end in (FAILED, DIFFERENT)]
    for outcome in wrong[:MAX_SHOWN]:
        at = outcome.began - seen.began
        told = f"at {at:.1f} s, for {outcome.ended - outcome.began:.1f} s, {outcome.kind} by {outcome.door}"
        print(f"{outcome.end} {told}: {outcome.reason} {outcome.text[:600]}", file=sys.stderr)
    for text in (*house.unasked[:MAX_SHOWN], *changes.refused[:MAX_SHOWN]):
        print(text, file=sys.stderr)
    for kill in house.kills:
        told = f"{kill.way} {kill.victim}, ready after {kill.ready_after_s:.1f} s"
        print(f"{kill.at - seen.began:7.1f} s {told}", file=sys.stderr)
