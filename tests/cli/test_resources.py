"""Resources that no machine has are refused by name; everything else is Ray's to place."""

from __future__ import annotations

import pytest

from pdserve.cli.resources import check_all, check_own, check_replicas
from pdserve.config import PoolSettings
from pdserve.errors import ConfigError

SMALL, LARGE, GPUS = {"CPU": 2.0}, {"CPU": 64.0}, {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("pools", "nodes"),
    [
        (PoolSettings(), (SMALL,)),
        (PoolSettings(prefill=9, decode=9, prefill_cpus=2.0, decode_cpus=2.0), (SMALL,)),  # they share
        (PoolSettings(prefill_cpus=64.0), (SMALL, LARGE)),
        (PoolSettings(prefill_gpus=0.5, decode_gpus=1.5), (SMALL, GPUS)),
        (PoolSettings(prefill_cpus=0.0, decode_cpus=0.0), ({},)),
    ],
)
def test_what_fits_passes(pools: PoolSettings, nodes: tuple[dict[str, float], ...]) -> None:
    check_all(pools, nodes)


@pytest.mark.parametrize(
    ("pools", "field", "told"),
    [
        (PoolSettings(prefill_cpus=1000.0), "pools.prefill_cpus", ("1000", "64")),
        (PoolSettings(decode_cpus=64.5), "pools.decode_cpus", ("64.5", "64")),
        (PoolSettings(decode_gpus=4.0), "pools.decode_gpus", ("4 GPUs", "2")),
        (PoolSettings(prefill=2, prefill_gpus=1.0, decode_gpus=1.0), "pools", ("3 GPUs", "2")),
    ],
)
def test_what_never_fits_is_named(pools: PoolSettings, field: str, told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_all(pools, (SMALL, LARGE, GPUS))
    assert (caught.value.reason, caught.value.field) == ("NO_SUCH_RESOURCES", field)
    assert all(text in str(caught.value) for text in told) and caught.value.remedy


def test_a_cluster_without_a_machine_has_nothing() -> None:
    with pytest.raises(ConfigError):
        check_replicas(PoolSettings(), ())


def test_of_this_machine_only_the_cpus_are_known_before_ray_has_started() -> None:
    check_own(PoolSettings(prefill_gpus=8.0), 2)
    with pytest.raises(ConfigError):
        check_own(PoolSettings(decode_cpus=2.5), 2)
