"""Which pools run on a cluster, and how many workers they have, as Serve tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray import serve

from pdserve.cluster.names import PREFIX, application_name
from pdserve.scaling.plan import ROLES

_LEAVING = ("STOPPING", "PENDING_MIGRATION")


@dataclass(frozen=True)
class Counts:
    """Replicas of one pool."""

    running: int = 0
    starting: int = 0  # not yet there, or between two states
    stopping: int = 0  # drain, and still hold their resources
    failure: str = ""  # why Serve has given the pool up; its own words


def count(applications: Mapping[str, str]) -> dict[str, Counts]:
    """
    Args:
        applications: role -> name of its Serve application.

    Blocks for an answer of Serve's controller; not for its event loop. Raises RayServeException, RayError.
    """
    known = serve.status().applications
    found = {}
    for role, name in applications.items():
        overview = known.get(name)
        deployment = overview.deployments.get(role) if overview is not None else None
        if overview is None or deployment is None:
            found[role] = Counts()
            continue
        states = {str(getattr(state, "value", state)): n for state, n in deployment.replica_states.items()}
        running, leaving = states.get("RUNNING", 0), sum(states.get(state, 0) for state in _LEAVING)
        failed = overview.status == "DEPLOY_FAILED"
        found[role] = Counts(
            running,
            sum(states.values()) - running - leaving,
            leaving,
            (deployment.message or overview.message) if failed else "",
        )
    return found


def generations() -> tuple[str, ...]:
    """Of the pools on this cluster, oldest first; "" is the first. Blocks like `count`."""
    names = serve.status().applications
    known = {
        name.removeprefix(f"{PREFIX}{role}").removeprefix("-") for name in names for role in ROLES if _is(name, role)
    }
    return tuple(sorted(known, key=lambda generation: (len(generation), generation)))


def applications_of(generation: str) -> dict[str, str]:
    """Role -> name of its Serve application."""
    return {role: application_name(role, generation) for role in ROLES}


def _is(name: str, role: str) -> bool:
    return name == f"{PREFIX}{role}" or name.startswith(f"{PREFIX}{role}-")
