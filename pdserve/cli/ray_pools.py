"""The pools on Ray: a local cluster of our own or one to join, and the Serve applications on it.

Ray is imported when it is first needed: it takes seconds, and some commands end before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdserve.cli.ray_errors import pool_failure
from pdserve.cli.resources import check_all, check_replicas
from pdserve.config import Config, PoolSettings
from pdserve.errors import ConfigError, Unavailable
from pdserve.rpc.settings import is_loopback
from pdserve.scaling.plan import Plan

Say = Callable[[str], None]

# Read by Ray when it is imported or started; quiet, and without telemetry.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call, as Serve's threads make one, would start a cluster of its own
}
# A cluster of one machine: Ray then listens on loopback only, on Linux too despite the name.
# Whoever reaches Ray's ports can run code.
LOCAL_RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def attach(address: str) -> None:
    """Connects to a running cluster; "auto" is the one of this machine. Raises Unavailable."""
    # A cluster on loopback is reached there and nowhere else: Ray would take this machine's other address instead.
    local = LOCAL_RAY_ENVIRONMENT if is_loopback(address.rpartition(":")[0]) else {}
    _set_environment(RAY_ENVIRONMENT | local | _token())
    import ray

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(error) from error
    _quiet()


def _token() -> dict[str, str]:
    """A cluster demands the token that its machine has; a client shows it only when it is told to."""
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return {"RAY_AUTH_MODE": "token"} if given or (Path.home() / ".ray" / "auth_token").exists() else {}


def start_own(pools: PoolSettings, plan: Plan) -> None:
    """Starts a cluster of this machine only, with logical CPUs for all that the plan allows. Raises Unavailable."""
    _set_environment(RAY_ENVIRONMENT | LOCAL_RAY_ENVIRONMENT)
    import ray

    # Besides the pools: the controller, which needs a CPU to be placed, and the first workers of an update.
    cpus = plan.budget.cpus + 1 + pools.prefill_cpus + pools.decode_cpus
    resources = dict.fromkeys((*pools.prefill_resources, *pools.decode_resources), 1000.0)
    try:
        ray.init(
            num_cpus=max(int(cpus) + 1, os.cpu_count() or 1),
            resources=resources or None,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(error) from error
    _quiet()


class RayPools:
    """The pools of one generation on a connected Ray."""

    def __init__(self, config: Config, generation: str = "") -> None:
        """`config`: with a registry that workers can reach."""
        self._config = config
        self._generation = generation

    def check_cluster(self, grows: bool, say: Say) -> None:
        """Raises ConfigError for what no node can hold. A cluster that grows may yet: there it is only said."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not grows:
            check_all(self._config.pools, nodes)
            return
        try:
            check_replicas(self._config.pools, nodes)
        except ConfigError as error:
            say(f"waiting for the cluster to grow: {error}")

    def check_free(self) -> None:
        """Raises ConfigError when the cluster runs pools of this name already."""
        from ray import serve

        from pdserve.cluster.installed import applications_of

        if taken := set(applications_of(self._generation).values()) & set(serve.status().applications):
            raise ConfigError(
                f"this Ray runs {', '.join(sorted(taken))} already",
                reason="ALREADY_UP",
                field="pools.ray_address",
                remedy="use another cluster, `pdserve update`, or `serve shutdown`",
            )

    def start(self, initial: int = 0) -> None:
        """Asks Serve for the pools, and does not wait for them. Raises Unavailable, ConfigError.

        Args:
            initial: workers of each pool to begin with; 0: as many as configured.
        """
        from ray import serve

        from pdserve.cluster.installed import applications_of
        from pdserve.ray_app import application, pools

        serve.start(proxy_location="Disabled")
        names = applications_of(self._generation)
        targets = [
            serve.RunTarget(
                application(self._config, pool, self._generation, initial), name=names[pool.role], route_prefix=None
            )
            for pool in pools(self._config)
        ]
        try:
            serve.run_many(targets, wait_for_applications_running=False)
        except RuntimeError as error:
            raise Unavailable(
                f"Ray Serve refused the pools: {error}",
                reason="RAY_SERVE",
                field="pools",
                remedy="see `serve status` and the log of the Serve controller",
            ) from error

    def check(self) -> None:
        """Raises ConfigError when Serve has given a pool up."""
        from pdserve.cluster.installed import applications_of, count

        for role, counts in count(applications_of(self._generation)).items():
            if counts.failure:
                raise pool_failure(role, counts.failure)


def stop_pools(generations: tuple[str, ...], say: Say) -> None:
    """Deletes applications: their workers drain, all at the same time. Returns when they are gone."""
    from ray import serve

    from pdserve.cluster.installed import applications_of
    from pdserve.cluster.notes import Notes

    names = [name for generation in generations for name in applications_of(generation).values()]
    there = serve.status().applications
    for name in names:
        if name in there:
            serve.delete(name, _blocking=False)
    for name in names:
        try:
            serve.delete(name)
        except (RuntimeError, TimeoutError) as error:
            say(f"{name} did not stop cleanly: {error}")
    for generation in generations:
        Notes(generation).clear()


def with_registry(config: Config, gateway: str) -> Config:
    """Workers of a router with an embedded registry announce themselves at its gateway."""
    registry = config.prefill.registry
    if registry.url != "memory://":
        return config
    registry = replace(registry, url=f"grpc://{gateway}")
    return replace(
        config,
        prefill=replace(config.prefill, registry=registry),
        decode=replace(config.decode, registry=registry),
    )


def _set_environment(wanted: dict[str, str]) -> None:
    os.environ.update({key: value for key, value in wanted.items() if key not in os.environ})


def _quiet() -> None:
    """Serve sets the level of its log when it is imported."""
    import ray.serve  # noqa: F401

    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _not_reached(error: Exception) -> Unavailable:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Unavailable(
        f"Ray did not start: {first}",
        reason="RAY",
        field="pools.ray_address",
        remedy="name a cluster that runs (`ray status`), or leave it empty to start one here",
    )
