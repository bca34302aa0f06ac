"""From a configuration to Serve applications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from pdserve.cluster.names import ROUTER, application_name
from pdserve.config import Config, load_config
from pdserve.errors import ConfigError
from pdserve.ray_app.router_replica import RouterReplica
from pdserve.ray_app.worker_replica import WorkerReplica
from pdserve.registry.records import DECODE, PREFILL
from router.settings import RouterSettings

STOP_S = 20.0  # for what a replica does after its grace period, a step that hangs included
STARTS = 2
"""What fails at start (a model that cannot be read, a port in use) fails again. One more, because Serve also counts
a replica that dies while a new controller takes it over, and would never replace it."""
_POLICY = "pdserve.cluster.serve_policy:ServePolicy"
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass(frozen=True)
class Pool:
    """What Ray needs to know of one pool."""

    role: str  # PREFILL | DECODE
    replicas: int
    cpus: float
    gpus: float
    resources: Mapping[str, float]  # custom resources of a replica
    grace_s: float  # longest drain of a replica

    @property
    def application(self) -> str:
        return application_name(self.role)


def pools(config: Config) -> tuple[Pool, Pool]:
    p = config.pools
    return (
        Pool(PREFILL, p.prefill, p.prefill_cpus, p.prefill_gpus, p.prefill_resources, config.prefill.grace_s),
        Pool(DECODE, p.decode, p.decode_cpus, p.decode_gpus, p.decode_resources, config.decode.grace_s),
    )


def application(config: Config, pool: Pool, generation: str = "", initial: int = 0) -> serve.Application:
    """The Serve application of one pool. Raises ConfigError as `Config.plan`.

    Args:
        initial: replicas to begin with; 0: as many as configured.
    """
    plan = config.plan()
    policy = AutoscalingPolicy(
        policy_function=_POLICY,
        policy_kwargs={"role": pool.role, "generation": generation, "plan": plan.to_json()},
    )
    deployment = serve.deployment(
        name=pool.role,
        # Serve starts one replica by itself when another dies; the router routes around it meanwhile.
        autoscaling_config=AutoscalingConfig(
            min_replicas=1,
            initial_replicas=initial or pool.replicas,
            max_replicas=plan.of(pool.role).most,
            # Our policy has its own hysteresis, on signals that Serve does not see.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        ),
        ray_actor_options={
            "num_cpus": pool.cpus,
            "num_gpus": pool.gpus,
            **({"resources": dict(pool.resources)} if pool.resources else {}),
        },
        graceful_shutdown_timeout_s=pool.grace_s + STOP_S,
        max_constructor_retry_count=STARTS,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        logging_config=_LOGGING,
    )(WorkerReplica)
    # A worker has no business with the router's settings, its tenants' keys least of all.
    return deployment.bind(pool.role, generation, _without_router(config))


def router_application(config: Config) -> serve.Application:
    """The router as one more deployment: on fixed ports, so at most one per node.

    Raises ConfigError when several routers would each have a registry of their own.
    """
    count = config.pools.routers
    if count > 1 and config.router.registry.url == "memory://":
        raise ConfigError(
            f"{count} routers need one registry",
            field="registry.url",
            remedy="name a Redis that all of them reach, or use one router",
        )
    deployment = serve.deployment(
        name=ROUTER,
        num_replicas=count,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": config.pools.router_cpus},
        graceful_shutdown_timeout_s=config.router.grace_s + STOP_S,
        max_constructor_retry_count=STARTS,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        logging_config=_LOGGING,
    )(RouterReplica)
    return deployment.bind(config.router)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Entry point for `serve deploy`: import_path "pdserve.ray_app:build", args {config, pool}.

    Args:
        args: `pool` is prefill, decode or router; `config` the path of a TOML file on the cluster's head,
            or a table with the same sections (none: defaults).

    Raises ConfigError for an unknown pool or a configuration that cannot work.
    """
    given = args.get("config")
    config = load_config(None, given) if isinstance(given, Mapping) else load_config(given)
    role = args.get("pool")
    if role == ROUTER:
        return router_application(config)
    for pool in pools(config):
        if pool.role == role:
            return application(config, pool)
    raise ConfigError(f"{role!r} is no pool", field="pool", remedy=f"use {PREFILL}, {DECODE} or {ROUTER}")


def _without_router(config: Config) -> Config:
    return Config(config.model, config.prefill, config.decode, RouterSettings(), config.pools, config.scaling)
