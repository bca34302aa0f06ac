"""The pools, and if wanted the router, as Ray Serve applications: one deployment each.

A replica only starts the same worker or router as `python -m prefill_worker`, `-m decode_worker`
or `-m router`. Ray manages processes (start, health, restart, count, resources); neither requests
nor caches pass through it. Serve sees none of our traffic, so its own drain returns at once and the
real one is in a replica's `__del__`; and its own autoscaling has nothing to go by: ours is in
pdserve/cluster.
"""

from __future__ import annotations

from pdserve.ray_app.applications import Pool, application, build, pools, router_application

__all__ = ["Pool", "application", "build", "pools", "router_application"]
