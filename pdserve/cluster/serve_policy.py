"""What Serve calls ten times a second to learn how many replicas a pool should have.

Serve pickles this module by value into its controller, so it holds nothing: the decisions are made
by the watcher of the generation, which both pools share.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from pdserve.cluster.watcher import watcher_of
from pdserve.scaling.plan import Plan


class ServePolicy:
    """One pool's policy; Serve makes it once per deployment, and calls it on its event loop: it never waits."""

    def __init__(self, role: str, generation: str, plan: str) -> None:
        self._role = role
        self._watcher = watcher_of(generation, Plan.from_json(plan))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Replicas, and no state for Serve to keep."""
        replicas = tuple(str(replica.unique_id) for replica in context.running_replicas)
        return self._watcher.target(self._role, context.app_name or "", replicas, context.target_num_replicas), {}
