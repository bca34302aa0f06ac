"""The sizes of both pools: one pure decision on what is seen, what is remembered, and what is allowed.

    decide(): remember pressure -> choose a goal -> go there, draining first

A goal comes from the operator (`pdserve scale`), or from pressure (modes ratio and auto): a pool
grows when its pressure has been high for `up_s`, and shrinks when it would stay low for `down_s`
without one worker, at most by `step`, not before `cooldown_s` after its last change, and never
while a change of it is under way. Where the budget holds no more, the other pool gives up a worker
if that lowers the worse of both pressures by a margin: so no move is ever taken back at once.

Draining first: a worker that stops counts until it is gone, so the growing pool waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdserve.registry.records import DECODE, PREFILL
from pdserve.scaling.plan import ROLES, Plan, Sizes
from pdserve.scaling.settings import AUTO, FIXED, RATIO, ScalingSettings

_MARGIN = 0.9  # a worker moves if the worst pressure falls below this part of what it was

OTHER = {PREFILL: DECODE, DECODE: PREFILL}


@dataclass(frozen=True)
class Seen:
    """One pool now."""

    running: int
    starting: int = 0
    stopping: int = 0  # drain, and still take their resources
    pressure: float | None = None  # None: nobody has reported


@dataclass(frozen=True)
class Memory:
    """What is remembered of one pool between two decisions. Times are monotonic seconds."""

    target: int
    pressure: float | None = None  # smoothed
    seen_at: float = 0.0
    high_since: float | None = None
    low_since: float | None = None
    changed_at: float = -math.inf

    @property
    def load(self) -> float:
        return self.pressure or 0.0


Memories = Mapping[str, Memory]  # by role


def decide(
    now: float, seen: Mapping[str, Seen], memories: Memories, plan: Plan, asked: Sizes | None = None
) -> dict[str, Memory]:
    """The next memories, with the targets in them. Pure.

    Args:
        asked: the operator's own sizes; they win over everything but the budget.
    """
    known = {role: _remember(now, seen[role], memories[role], plan, role) for role in ROLES}
    if asked is not None:
        goal = dict(asked)
    elif plan.settings.mode == FIXED:
        goal = {role: plan.of(role).configured for role in ROLES}
    else:
        goal = _goal(now, seen, known, plan)
    targets = _drain_first(goal, seen, known, plan)
    return {role: _changed(now, known[role], targets[role]) for role in ROLES}


def _remember(now: float, seen: Seen, memory: Memory, plan: Plan, role: str) -> Memory:
    """Smooths pressure, and notes since when it has been high or low."""
    if seen.pressure is None:
        return replace(memory, high_since=None, low_since=None, seen_at=now)
    settings = plan.settings
    share = 1.0 - math.exp(-(now - memory.seen_at) / settings.window_s)
    smooth = seen.pressure if memory.pressure is None else memory.pressure + share * (seen.pressure - memory.pressure)
    high = smooth > settings.high
    low = memory.target > plan.of(role).least and _after(smooth, memory.target, -1) < settings.low
    return replace(
        memory,
        pressure=smooth,
        seen_at=now,
        high_since=_since(now, memory.high_since, high),
        low_since=_since(now, memory.low_since, low),
    )


def _goal(now: float, seen: Mapping[str, Seen], known: Memories, plan: Plan) -> dict[str, int]:
    """One step from the present targets."""
    settings = plan.settings
    goal = {role: memory.target for role, memory in known.items()}
    by_need = sorted(ROLES, key=lambda role: known[role].load, reverse=True)
    for role in by_need:
        if _ripe(now, seen[role], known[role], known[role].high_since, settings.up_s, settings):
            _grow(role, goal, seen, known, plan)
            if goal != {r: m.target for r, m in known.items()}:
                return goal  # one change at a time: the next one is decided on what this one brings
    if settings.mode == AUTO:
        for role in ROLES:
            if _ripe(now, seen[role], known[role], known[role].low_since, settings.down_s, settings):
                goal[role] = _fewer(known[role], plan.of(role).least, settings)
    elif settings.mode == RATIO and all(_settled(seen[role], known[role]) for role in ROLES):
        for role in by_need:  # nothing of the budget lies idle
            if goal[role] < plan.of(role).most and plan.fits({**goal, role: goal[role] + 1}):
                goal[role] += 1
                break
    return goal


def _grow(role: str, goal: dict[str, int], seen: Mapping[str, Seen], known: Memories, plan: Plan) -> None:
    """Raises the goal of a pool by what the budget holds; else by what the other pool can spare. Changes `goal`."""
    here, there, other = known[role], known[OTHER[role]], OTHER[role]
    wanted = min(plan.of(role).most, here.target + plan.settings.step, math.ceil(here.target * here.load))
    for size in range(wanted, here.target, -1):
        if plan.fits({**goal, role: size}):
            goal[role] = size
            return
    if wanted <= here.target or not _settled(seen[other], there):
        return
    for spared in range(1, there.target - plan.of(other).least + 1):
        moved = {role: here.target + 1, other: there.target - spared}
        if plan.fits(moved):
            worst = max(_after(here.load, here.target, 1), _after(there.load, there.target, -spared))
            if worst < _MARGIN * max(here.load, there.load):
                goal.update(moved)
            return


def _fewer(memory: Memory, least: int, settings: ScalingSettings) -> int:
    """The size to shrink to: pressure stays low there, too."""
    for size in range(max(least, memory.target - settings.step), memory.target):
        if _after(memory.load, memory.target, size - memory.target) < settings.low:
            return size
    return memory.target


def _drain_first(goal: Sizes, seen: Mapping[str, Seen], known: Memories, plan: Plan) -> dict[str, int]:
    """Shrinks at once, and grows only into what nobody takes any more."""
    targets = {role: min(known[role].target, goal[role]) for role in ROLES}
    for role in sorted(ROLES, key=lambda role: known[role].load, reverse=True):
        while targets[role] < goal[role]:
            larger = {**targets, role: targets[role] + 1}
            taken = {r: max(larger[r], seen[r].running + seen[r].starting) + seen[r].stopping for r in ROLES}
            if not plan.fits(taken):
                break
            targets = larger
    return targets


def _changed(now: float, memory: Memory, target: int) -> Memory:
    if target == memory.target:
        return memory
    return replace(memory, target=target, changed_at=now, high_since=None, low_since=None)


def _ripe(
    now: float, seen: Seen, memory: Memory, since: float | None, hold_s: float, settings: ScalingSettings
) -> bool:
    """Held long enough, nothing under way, and not just changed."""
    held = since is not None and now - since >= hold_s
    return held and _settled(seen, memory) and now - memory.changed_at >= settings.cooldown_s


def _settled(seen: Seen, memory: Memory) -> bool:
    return seen.running == memory.target and not seen.starting and not seen.stopping


def _since(now: float, since: float | None, holds: bool) -> float | None:
    return (now if since is None else since) if holds else None


def _after(load: float, workers: int, change: int) -> float:
    """The pressure if the same load is shared by so many more or fewer."""
    return load * workers / (workers + change) if workers + change > 0 else math.inf
