"""Names that several parts must agree on."""

from __future__ import annotations

PREFIX = "pdserve-"  # of every Serve application of ours
ROUTER = "router"


def application_name(role: str, generation: str = "") -> str:
    """Name of the Serve application of a pool. A generation is what one `pdserve update` brought; "" is the first."""
    return f"{PREFIX}{role}-{generation}" if generation else f"{PREFIX}{role}"


def worker_id(application: str, replica_id: str) -> str:
    """A worker's name in the registry, by which the policy tells its own from others."""
    return f"{application.removeprefix(PREFIX)}-{replica_id}"
