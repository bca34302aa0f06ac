"""One worker in a Ray actor."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

from ray import serve

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.cluster.found_registry import FoundRegistry
from pdserve.cluster.names import worker_id
from pdserve.cluster.notes import Announced, Notes
from pdserve.config import Config
from pdserve.drain import DrainDoor
from pdserve.errors import Unavailable
from pdserve.ray_app.addresses import Ports, listen_where_ray_does, node_host, port_range
from pdserve.registry.records import PREFILL, Registry
from pdserve.rpc.settings import is_loopback
from pdserve.telemetry import logs
from pdserve.worker.metrics_page import interface
from pdserve.worker_main import open_worker, open_worker_registry
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker


class WorkerReplica:
    """Starts a worker on the event loop that Serve runs it on; health and drain are the worker's own."""

    async def __init__(self, role: str, generation: str, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        listen_where_ray_does()
        ports = Ports(port_range(config.pools.ports))
        settings = _settings(role, config, ports)
        # The process's own: what stands in its place in a replica can be Serve's, which drops our lines.
        logs.configure(settings.telemetry, role, settings.worker_id, stream=sys.__stderr__)
        self._grace_s = settings.grace_s
        self._registry = _registry(settings, config.pools.ready_timeout_s)
        self._worker: PrefillWorker | DecodeWorker = (
            await open_worker(PrefillWorker, settings, self._registry)
            if isinstance(settings, PrefillSettings)
            else await open_worker(DecodeWorker, settings, self._registry)
        )
        self._door = DrainDoor(lambda: self._worker.drain(self._grace_s))
        await self._worker.start()
        await self._door.open()
        # For the autoscaling policy, which reads the same records as the routers.
        announced = Announced(settings.registry.url, settings.registry, settings.rpc)
        await asyncio.to_thread(Notes(generation).announce, announced)

    async def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica."""
        if self._worker.broken.is_set():
            raise Unavailable(
                "a background task of the worker has died",
                reason="WORKER_BROKEN",
                remedy="Ray Serve replaces it; its log says why",
            )
        if self._worker.stalled:
            raise Unavailable(
                "an engine step does not end", reason="STALLED", remedy="Ray Serve replaces it; its log says why"
            )

    async def describe(self) -> tuple[str, int]:
        """The worker's id, which is also its name in the registry, and its process id."""
        return self._worker.worker_id, os.getpid()

    async def __del__(self) -> None:
        """Drains: Serve awaits this when it stops the replica, and nothing else here waits for requests."""
        door = getattr(self, "_door", None)
        if door is not None:
            await door.close()
        worker = getattr(self, "_worker", None)
        if worker is not None:
            await worker.drain(self._grace_s)
            await worker.stop()
        registry = getattr(self, "_registry", None)
        if registry is not None:
            await registry.close()


def _settings(role: str, config: Config, ports: Ports) -> PrefillSettings | DecodeSettings:
    """With this replica's own name and addresses."""
    settings: PrefillSettings | DecodeSettings = config.prefill if role == PREFILL else config.decode
    host = node_host(settings.host)
    settings = replace(
        settings,
        host=host,
        worker_id=settings.worker_id or worker_id(serve.get_replica_context().app_name, _replica_id()),
        port=settings.port or ports.take(host),
    )
    if isinstance(settings, DecodeSettings):
        settings = replace(settings, transfer_port=settings.transfer_port or ports.take(host))
    page = node_host(interface(settings))
    if settings.metrics_port == 0 and not is_loopback(page):
        settings = replace(settings, metrics_port=ports.take(page))
    return replace(settings, metrics_host=page)


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _registry(settings: PrefillSettings | DecodeSettings, within_s: float) -> Registry | None:
    """As configured; else that of the router in the same Serve."""
    return open_worker_registry(settings) or FoundRegistry(settings.registry, settings.rpc, within_s)
