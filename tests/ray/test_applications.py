"""From a configuration to Serve applications, without a cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pdserve.cluster.notes import Announced
from pdserve.config import load_config
from pdserve.errors import ConfigError
from pdserve.ray_app import application, build, pools
from pdserve.ray_app.addresses import Ports, port_range
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, TlsSettings


def built(args: dict[str, Any]) -> Any:
    return build(args)._bound_deployment


def test_serve_deploy_builds_one_application_per_pool_and_one_for_the_router() -> None:
    for pool in ("prefill", "decode", "router"):
        assert built({"pool": pool}).name == pool
    with pytest.raises(ConfigError, match="no pool"):
        build({"pool": "middle"})


def test_a_table_in_the_arguments_is_a_configuration_too() -> None:
    deployment = built({"pool": "prefill", "config": {"pools": {"prefill": 3}}})
    assert deployment._deployment_config.autoscaling_config.initial_replicas == 3


def test_resources_of_a_replica_are_what_the_configuration_says() -> None:
    tables = {"prefill": 3, "prefill_cpus": 2.5, "decode_gpus": 1, "decode_cpus": 4, "decode_resources": {"big": 0.5}}
    config = load_config(None, {"pools": tables})
    options, sizes = {}, {}
    for pool in pools(config):
        deployment: Any = application(config, pool)._bound_deployment
        scaling = deployment._deployment_config.autoscaling_config
        options[pool.role] = deployment.ray_actor_options
        sizes[pool.role] = (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas)
    assert options["prefill"] == {"num_cpus": 2.5, "num_gpus": 0.0}
    assert options["decode"] == {"num_cpus": 4.0, "num_gpus": 1.0, "resources": {"big": 0.5}}
    # The budget is 3 * 2.5 + 4 CPUs and one GPU: no other decode worker, and three of prefill beside it.
    assert sizes == {"prefill": (1, 3, 3), "decode": (1, 1, 1)}


def test_several_routers_need_one_registry() -> None:
    with pytest.raises(ConfigError, match="one registry"):
        build({"pool": "router", "config": {"pools": {"routers": 2}}})
    config = {"pools": {"routers": 2}, "registry": {"url": "redis://127.0.0.1:6379/0"}}
    deployment = built({"pool": "router", "config": config})
    assert (deployment.num_replicas, deployment._replica_config.max_replicas_per_node) == (2, 1)


class TestPorts:
    def test_two_that_start_at_the_same_time_get_different_ports(self) -> None:
        first, second = Ports(range(28700, 28800)), Ports(range(28700, 28800))
        taken = [ports.take("127.0.0.1") for ports in (first, second, first, second)]
        assert len(set(taken)) == 4 and all(28700 <= port < 28800 for port in taken)
        first.close()
        again = Ports(range(28700, 28800))
        assert again.take("127.0.0.1") == taken[0], "closed: free again"
        again.close()
        second.close()

    def test_a_port_that_somebody_else_uses_is_passed_over_and_a_full_range_is_an_error(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            ports = Ports(range(port, port + 1))
            with pytest.raises(ConfigError) as caught:
                ports.take("127.0.0.1")
        assert caught.value.reason == "NO_PORT" and caught.value.field == "pools.ports"

    def test_without_a_range_any_port_will_do(self) -> None:
        assert Ports(port_range("")).take("127.0.0.1") == 0

    @pytest.mark.parametrize("text", ["8500", "8599-8500", "0-10", "8500-70000", "a-b", "-"])
    def test_what_is_no_range_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="range"):
            port_range(text)


def test_how_the_registry_is_reached_survives_the_store() -> None:
    """Settings within settings, too: the policy would stop at its first look, and sizes would never change."""
    tls = TlsSettings("tls.crt", "tls.key", "ca.crt", "mine")
    announced = Announced("redis://h:1/0", RegistrySettings(lease_s=7.0), RpcSettings(call_timeout_s=3.0, tls=tls))
    assert Announced.from_json(announced.to_json()) == announced
