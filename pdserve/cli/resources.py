"""Whether Ray can ever place what the configuration asks for: it would wait for it without an end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.config import PoolSettings
from pdserve.errors import ConfigError

_KINDS = (("cpus", "CPU"), ("gpus", "GPU"))

Node = Mapping[str, float]  # Ray's names: CPU, GPU


def check_replicas(pools: PoolSettings, nodes: Sequence[Node], kinds: Sequence[tuple[str, str]] = _KINDS) -> None:
    """Raises ConfigError naming the first setting by which no node can hold a replica."""
    for pool in ("prefill", "decode"):
        for kind, resource in kinds:
            needed = getattr(pools, f"{pool}_{kind}")
            largest = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if needed > largest:
                raise ConfigError(
                    f"a replica needs {needed:g} {resource}s, and no machine has more than {largest:g}",
                    reason="NO_SUCH_RESOURCES",
                    field=f"pools.{pool}_{kind}",
                    remedy="ask for less, or join a cluster of larger machines with pools.ray_address",
                )


def check_own(pools: PoolSettings, cpus: int) -> None:
    """Before a cluster of this machine is started. How many replicas share its CPUs is the operator's choice."""
    check_replicas(pools, ({"CPU": float(cpus)},), _KINDS[:1])


def check_all(pools: PoolSettings, nodes: Sequence[Node]) -> None:
    """For a cluster that does not grow: `check_replicas`, and GPUs for all of them together."""
    check_replicas(pools, nodes)
    needed = pools.prefill * pools.prefill_gpus + pools.decode * pools.decode_gpus
    there = sum(node.get("GPU", 0.0) for node in nodes)
    if needed > there:
        raise ConfigError(
            f"all replicas need {needed:g} GPUs, and there are {there:g}",
            reason="NO_SUCH_RESOURCES",
            field="pools",
            remedy="ask for fewer replicas or GPUs",
        )
