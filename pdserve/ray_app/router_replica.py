"""One router in a Ray actor: the same as `python -m router`, with the gateway on a fixed port of its node."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

from pdserve.cluster.notes import Notes
from pdserve.errors import Unavailable
from pdserve.ray_app.addresses import listen_where_ray_does, node_host
from pdserve.telemetry import logs
from router.app import Router
from router.settings import RouterSettings


class RouterReplica:
    """Started and drained like a worker; clients reach it at its own ports, not through Serve."""

    async def __init__(self, settings: RouterSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_where_ray_does()
        logs.configure(settings.telemetry, "router", stream=sys.__stderr__)  # see worker_replica.py
        self._router = Router(
            replace(settings, host=node_host(settings.host), http_host=node_host(settings.http_interface))
        )
        await self._router.start()
        await asyncio.to_thread(Notes("").put_router, self._router.address)

    async def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica."""
        if self._router.broken.is_set():
            raise Unavailable(
                "a background task of the router has died",
                reason="ROUTER_BROKEN",
                remedy="Ray Serve replaces it; its log says why",
            )

    async def addresses(self) -> tuple[str, str]:
        """host:port of the gateway, and of the OpenAI endpoint."""
        return self._router.address, self._router.http_address

    async def describe(self) -> int:
        """The process id."""
        return os.getpid()

    async def __del__(self) -> None:
        """Serve awaits this: requests in flight may finish."""
        router = getattr(self, "_router", None)
        if router is not None:
            await router.drain()
            await router.stop()
