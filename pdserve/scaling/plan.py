"""What the pools may take: the cost of a worker, the budget, and the bounds of each pool."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pdserve.errors import ConfigError
from pdserve.registry.records import DECODE, PREFILL
from pdserve.scaling.settings import ScalingSettings

ROLES = (PREFILL, DECODE)
WITHOUT_COST = 64  # most workers of a pool that costs nothing, where none are named
_SLACK = 1e-6  # for sums of fractions of a CPU

Sizes = Mapping[str, int]  # role -> workers


@dataclass(frozen=True)
class Cost:
    """Ray's logical resources."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class Bounds:
    configured: int  # what [pools] says
    least: int
    most: int  # by itself; the budget may hold fewer
    cost: Cost  # of one worker


@dataclass(frozen=True)
class Plan:
    prefill: Bounds
    decode: Bounds
    budget: Cost
    settings: ScalingSettings

    def of(self, role: str) -> Bounds:
        return self.prefill if role == PREFILL else self.decode

    def fits(self, sizes: Sizes) -> bool:
        """Whether the budget holds so many workers."""
        cpus = sum(self.of(role).cost.cpus * sizes[role] for role in ROLES)
        gpus = sum(self.of(role).cost.gpus * sizes[role] for role in ROLES)
        return cpus <= self.budget.cpus + _SLACK and gpus <= self.budget.gpus + _SLACK

    def check_goal(self, sizes: Sizes) -> None:
        """Raises ConfigError for sizes that the pools may not take."""
        for role in ROLES:
            bounds = self.of(role)
            if not 1 <= sizes[role] <= bounds.most:
                raise ConfigError(
                    f"{sizes[role]} workers are not allowed",
                    reason="POOL_SIZE",
                    field=role,
                    remedy=f"use 1 to {bounds.most}",
                )
        if not self.fits(sizes):
            raise ConfigError(
                f"{sizes[PREFILL]} prefill and {sizes[DECODE]} decode workers take more than the budget of "
                f"{self.budget.cpus:g} CPUs and {self.budget.gpus:g} GPUs",
                reason="OVER_BUDGET",
                field="scaling.budget_cpus",
                remedy="ask for fewer, or start the pools with a larger [scaling] budget",
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of to_json."""
        table = json.loads(text)
        bounds = {role: Bounds(**{**table[role], "cost": Cost(**table[role]["cost"])}) for role in ROLES}
        settings = ScalingSettings(**table["settings"])
        return cls(bounds[PREFILL], bounds[DECODE], Cost(**table["budget"]), settings)


def make_plan(sizes: Sizes, costs: Mapping[str, Cost], settings: ScalingSettings) -> Plan:
    """
    Args:
        sizes, costs: per role, as [pools] says.

    Raises ConfigError when the budget does not hold what is asked for.
    """
    configured = Cost(
        sum(sizes[role] * costs[role].cpus for role in ROLES), sum(sizes[role] * costs[role].gpus for role in ROLES)
    )
    budget = Cost(settings.budget_cpus or configured.cpus, settings.budget_gpus or configured.gpus)
    least = {PREFILL: settings.prefill_min, DECODE: settings.decode_min}
    named = {PREFILL: settings.prefill_max, DECODE: settings.decode_max}
    bounds = {}
    for role, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        holds = _holds(budget, costs[role], costs[other])  # beside one worker of the other pool
        most = max(1, min(named[role] or holds, holds))
        if not least[role] <= sizes[role] <= most:
            raise ConfigError(
                f"{sizes[role]} workers are outside {least[role]} to {most}",
                reason="POOL_SIZE",
                field=f"pools.{role}",
                remedy=f"change it, or scaling.{role}_min, {role}_max or the budget",
            )
        bounds[role] = Bounds(sizes[role], least[role], most, costs[role])
    plan = Plan(bounds[PREFILL], bounds[DECODE], budget, settings)
    plan.check_goal(sizes)
    return plan


def _holds(budget: Cost, own: Cost, beside: Cost) -> int:
    """Workers that a budget holds beside one of the other pool."""
    rooms = [(budget.cpus - beside.cpus, own.cpus), (budget.gpus - beside.gpus, own.gpus)]
    counts = [math.floor((room + _SLACK) / each) for room, each in rooms if each > 0]
    return min(counts, default=WITHOUT_COST)
