"""A load over time, put to the policy as a cluster would: workers start and drain in their own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.registry.records import DECODE, PREFILL
from pdserve.scaling.plan import ROLES, Cost, Plan, Sizes, make_plan
from pdserve.scaling.policy import Memory, Seen, decide
from pdserve.scaling.settings import ScalingSettings

TICK_S = 0.5
START_S = 8.0  # a worker loads its model
DRAIN_S = 6.0  # its requests finish

# Total load of a pool in workers' worth, at a time in seconds: 2.0 keeps two workers as busy as they should be.
Load = Callable[[float], float]


def recorded(*points: tuple[float, float]) -> Load:
    """A load that holds each value from its time on."""

    def at(now: float) -> float:
        return [value for start, value in points if start <= now][-1]

    return at


def plan(prefill: int = 2, decode: int = 2, costs: tuple[float, float] = (1.0, 1.0), **settings: object) -> Plan:
    return make_plan(
        {PREFILL: prefill, DECODE: decode},
        {PREFILL: Cost(costs[0]), DECODE: Cost(costs[1])},
        ScalingSettings(**settings),  # type: ignore[arg-type]
    )


@dataclass
class PoolState:
    running: int
    starting: list[float] = field(default_factory=list)  # when each is ready
    stopping: list[float] = field(default_factory=list)  # when each is gone

    @property
    def alive(self) -> int:
        return self.running + len(self.starting)

    def follow(self, now: float, target: int) -> None:
        self.running += sum(1 for ready in self.starting if ready <= now)
        self.starting = [ready for ready in self.starting if ready > now]
        self.stopping = [gone for gone in self.stopping if gone > now]
        while self.alive < target:
            self.starting.append(now + START_S)
        while self.alive > target:
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1
                self.stopping.append(now + DRAIN_S)


@dataclass(frozen=True)
class Moment:
    at: float
    targets: Sizes
    taken: Sizes  # workers whose resources are taken, those that drain included


class Cluster:
    """Replays loads; `run` gives every tick."""

    def __init__(self, allowed: Plan, prefill: Load, decode: Load) -> None:
        self.plan = allowed
        self.loads = {PREFILL: prefill, DECODE: decode}
        self.pools = {role: PoolState(allowed.of(role).configured) for role in ROLES}
        self.memories = {role: Memory(allowed.of(role).configured) for role in ROLES}
        self.now = 0.0

    def run(self, seconds: float, asked: Sizes | None = None) -> list[Moment]:
        moments = []
        end = self.now + seconds
        while self.now < end:
            seen = {role: self._seen(role) for role in ROLES}
            self.memories = decide(self.now, seen, self.memories, self.plan, asked)
            for role in ROLES:
                self.pools[role].follow(self.now, self.memories[role].target)
            taken = {role: pool.alive + len(pool.stopping) for role, pool in self.pools.items()}
            moments.append(Moment(self.now, {r: self.memories[r].target for r in ROLES}, taken))
            self.now += TICK_S
        return moments

    def _seen(self, role: str) -> Seen:
        pool = self.pools[role]
        pressure = self.loads[role](self.now) / pool.running if pool.running else None
        return Seen(pool.running, len(pool.starting), len(pool.stopping), pressure)


def sizes(moments: Iterable[Moment]) -> list[tuple[int, int]]:
    """(prefill, decode) targets, each once for as long as it stays."""
    found: list[tuple[int, int]] = []
    for moment in moments:
        pair = (moment.targets[PREFILL], moment.targets[DECODE])
        if not found or found[-1] != pair:
            found.append(pair)
    return found


def changes(moments: Sequence[Moment], role: str) -> list[float]:
    """When a pool's target changed."""
    return [after.at for before, after in pairwise(moments) if before.targets[role] != after.targets[role]]
