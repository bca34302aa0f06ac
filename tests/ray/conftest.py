"""One local cluster for every test here: two replicas of each pool, started as `pdserve up` starts them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import psutil
import pytest

from pdserve.cli.deployment import Deployment
from pdserve.cluster.notes import Notes
from pdserve.config import Config, load_config
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.local import LocalRunner
from pdserve.registry.records import DECODE, PREFILL
from tests.ray.asking import tables, write_model

SETTLE_S = 10.0


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(None, tables(write_model(tmp_path_factory.mktemp("model") / "tiny.pdmodel", seed=0)))


@pytest.fixture(scope="package")
def deployment(config: Config) -> Iterator[Deployment]:
    """Leaves no process behind; that is asserted at the end."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Deployment(config, None, lambda text: None) as running:
        Notes("").ask({PREFILL: 2, DECODE: 2})  # until a test gives the sizes to the policy
        yield running
    with warnings.catch_warnings():
        # Ray's driver leaves its sockets and subprocess handles to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=SETTLE_S)
    assert not alive, f"left running: {alive}"


@pytest.fixture(scope="package")
def baseline(config: Config) -> LocalRunner:
    return local_runner(config)


def local_runner(config: Config) -> LocalRunner:
    return LocalRunner(Engine(load_model(config.model.path, "fp32"), config.decode.engine))
