"""The pools as Ray Serve applications: one deployment per pool, each replica one worker.

A replica only starts the same worker as `python -m prefill_worker` or `python -m
decode_worker`, which registers its own address with a lease. Ray manages processes (start,
health, restart, count, resources); neither requests nor caches pass through it. Serve sees
none of our traffic, so its own drain returns at once and the real one is in `__del__`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica
from ray.serve.schema import LoggingConfig

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.config import Config, load_config
from pdserve.errors import ConfigError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.worker_main import open_worker, open_worker_registry
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker

log = logging.getLogger(__name__)

STOP_S = 20.0  # for what a replica does after its grace period, a step that hangs included


@dataclass(frozen=True)
class Pool:
    """What Ray needs to know of one pool."""

    role: str  # PREFILL | DECODE
    replicas: int
    cpus: float
    gpus: float
    grace_s: float  # longest drain of a replica

    @property
    def application(self) -> str:
        return f"pdserve-{self.role}"


def pools(config: Config) -> tuple[Pool, Pool]:
    p = config.pools
    return (
        Pool(PREFILL, p.prefill, p.prefill_cpus, p.prefill_gpus, config.prefill.grace_s),
        Pool(DECODE, p.decode, p.decode_cpus, p.decode_gpus, config.decode.grace_s),
    )


def application(config: Config, pool: Pool) -> serve.Application:
    """The Serve application of one pool."""
    deployment = serve.deployment(
        name=pool.role,
        num_replicas=pool.replicas,
        # Serve starts one replica by itself when another dies; the router routes around it meanwhile.
        ray_actor_options={"num_cpus": pool.cpus, "num_gpus": pool.gpus},
        graceful_shutdown_timeout_s=pool.grace_s + STOP_S,
        # What fails once at start (a model that cannot be read, a port in use) fails again.
        max_constructor_retry_count=1,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )(WorkerReplica)
    return deployment.bind(pool.role, config)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Entry point for `serve deploy`: import_path "pdserve.ray_app:build", args {config, pool}.

    Raises ConfigError for an unknown pool or a configuration that cannot work.
    """
    config = load_config(args.get("config"))
    for pool in pools(config):
        if pool.role == args.get("pool"):
            return application(config, pool)
    raise ConfigError(f"{args.get('pool')!r} is no pool", field="pool", remedy=f"use {PREFILL} or {DECODE}")


class WorkerReplica:
    """One worker in a Ray actor, on the event loop that Serve runs it on."""

    async def __init__(self, role: str, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        _listen_where_ray_does()
        settings: PrefillSettings | DecodeSettings = config.prefill if role == PREFILL else config.decode
        self._grace_s = settings.grace_s
        self._registry = open_worker_registry(settings)
        self._worker: PrefillWorker | DecodeWorker = (
            await open_worker(PrefillWorker, config.prefill, self._registry)
            if role == PREFILL
            else await open_worker(DecodeWorker, config.decode, self._registry)
        )
        await self._worker.start()

    async def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica."""
        if self._worker.broken.is_set():
            raise Unavailable("a background task of the worker has died", reason="WORKER_BROKEN")
        if self._worker.stalled:
            raise Unavailable("an engine step does not end", reason="STALLED")

    async def describe(self) -> tuple[str, int]:
        """The worker's id, which is also its name in the registry, and its process id."""
        return self._worker.worker_id, os.getpid()

    async def __del__(self) -> None:
        """Drains: Serve awaits this when it stops the replica, and nothing else here waits for requests."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            await worker.drain(self._grace_s)
            await worker.stop()
        registry = getattr(self, "_registry", None)
        if registry is not None:
            await registry.close()


def _listen_where_ray_does() -> None:
    """Keeps Serve's own server of this replica on the node's address.

    Serve opens, after this constructor, a port for calls between deployments, on every interface
    whatever address Ray was given; whoever reaches it can run code. There is no setting for it.
    """
    node = ray.util.get_node_ip_address()
    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", node))
