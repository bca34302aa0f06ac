"""Prefill on one Ray node, decode on another, with a network between them that is slow, cut, and lost for a while."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.config import load_config
from pdserve.errors import PdserveError
from pdserve.local import LocalRunner
from tests.ray.asking import ANYWHERE, ask, by_role, expected, long_requests, requests, settled, tables, write_model
from tests.ray.conftest import local_runner
from tests.ray.network import Network, NotPermitted
from tests.ray.test_sizes import toml

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

RAY_PORT, GATEWAY_PORT, TRANSFER, RELAYED = 6379, 8470, 8500, 8501
WORKERS = 3  # two of prefill, so that a transfer that was cut has another pair
LEASE_S = 2.0  # shorter than Ray's own patience with a node


@dataclass(frozen=True)
class Site:
    network: Network
    gateway: str
    relay: subprocess.Popen[str]
    baseline: LocalRunner

    def tell_relay(self, line: str) -> None:
        assert self.relay.stdin is not None and self.relay.stdout is not None
        self.relay.stdin.write(f"{line}\n")
        self.relay.stdin.flush()
        assert self.relay.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(machines=2)
    try:
        with made:
            yield made
    except NotPermitted as reason:
        pytest.skip(str(reason))
    assert made.left() == []


@pytest.fixture(scope="module")
def site(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two Ray nodes, and `pdserve up` on the first."""
    folder = tmp_path_factory.mktemp("site")
    session = Path(tempfile.mkdtemp(prefix="pdray"))  # short: it holds Ray's sockets
    environment = {
        "RAY_AUTH_MODE": "token",  # whoever else reaches this network runs no code on it
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PDSERVE_STATE": str(folder / "up.json"),
    }
    config = folder / "pdserve.toml"
    config.write_text(toml(site_tables(network, write_model(folder / "tiny.pdmodel", seed=0))))
    head, other = network.address(1), network.address(2)
    try:
        shared = ("--num-cpus", "3", "--object-store-memory", "100000000")
        start_node(network, 1, environment, folder, "--head", "--port", str(RAY_PORT), "--temp-dir", str(session),
                   "--include-dashboard", "false", "--resources", '{"first": 1}', *shared)  # fmt: skip
        start_node(network, 2, environment, folder, "--address", f"{head}:{RAY_PORT}",
                   "--resources", '{"second": 1}', *shared)  # fmt: skip
        ends = (f"{other}:{RELAYED}", f"{other}:{TRANSFER}")
        relay = network.spawn(2, [sys.executable, "-m", "tests.ray.slow_relay", *ends], {}, folder / "relay.log")
        up = network.spawn(
            1, [sys.executable, "-m", "pdserve.cli", "up", "--config", str(config)], environment, folder / "up.log"
        )
        wait_ready(up, folder / "up.log")
        assert relay.stdout is not None and relay.stdout.readline() == "ready\n"
        yield Site(network, f"{head}:{GATEWAY_PORT}", relay, local_runner(load_config(config)))
        up.terminate()
        assert up.wait(60.0) == 0, (folder / "up.log").read_text()
    finally:
        network.close()
        shutil.rmtree(session, ignore_errors=True)


def site_tables(network: Network, model: Path) -> dict[str, dict[str, object]]:
    made = tables(model)
    made["scaling"] = {}
    made["rpc"] = {"allow_plaintext": True, "keepalive_s": 1.0, "keepalive_timeout_s": 1.0, "connect_timeout_s": 1.0}
    made["registry"] = {"lease_s": LEASE_S, "heartbeat_s": 0.3, "timeout_s": 1.0}
    made["router"] = {"host": "0.0.0.0", "port": GATEWAY_PORT, "http_port": 0}
    made["prefill"] = {**made["prefill"], "host": "0.0.0.0", "lease_s": 10.0}
    made["decode"] = {
        "host": "0.0.0.0",
        "transfer_port": TRANSFER,
        "advertise_transfer": f"{network.address(2)}:{RELAYED}",
        "idle_s": 3.0,
        "receive_s": 20.0,
    }
    made["pools"] = {
        "prefill": 2,
        "decode": 1,
        "prefill_cpus": 0.5,
        "decode_cpus": 0.5,
        "prefill_resources": {"first": 0.1},
        "decode_resources": {"second": 0.1},
        "ray_address": f"{network.address(1)}:{RAY_PORT}",
    }
    return made


def start_node(network: Network, machine: int, environment: dict[str, str], folder: Path, *arguments: str) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    where = ("--node-ip-address", network.address(machine), "--disable-usage-stats")
    node = network.spawn(machine, [ray, "start", *arguments, *where], environment, folder / f"node{machine}.log")
    said, _ = node.communicate(timeout=60.0)
    assert node.returncode == 0, f"{said}\n{(folder / f'node{machine}.log').read_text()}"


def wait_ready(up: subprocess.Popen[str], log: Path) -> None:
    """It says so on standard error."""
    while "ready: " not in log.read_text():
        try:
            up.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"it ended: {log.read_text()}")


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(site.gateway, ANYWHERE) as client:
        yield client
        assert by_role(await settled(client, WORKERS)) == (2, 1)  # no page is held on either node


async def test_pools_on_different_nodes_give_the_answers_of_one_process(site: Site) -> None:
    asked = requests(8, tokens=24)
    async with connected(site) as client:
        got = await asyncio.gather(*(ask(client, ids, params) for ids, params in asked))
        where = {worker.role: worker.addresses[0].rpartition(":")[0] for worker in await settled(client, WORKERS)}
    assert list(got) == expected(site.baseline, asked)
    assert where == {"prefill": site.network.address(1), "decode": site.network.address(2)}


async def test_a_slow_network_changes_no_answer(site: Site) -> None:
    asked = long_requests(4, seed=300)
    site.tell_relay("delay 0.05")
    site.network.limit(2, megabits=8)
    try:
        async with connected(site) as client:
            got = await asyncio.gather(*(ask(client, ids, params) for ids, params in asked))
    finally:
        site.network.limit(2, None)
        site.tell_relay("delay 0")
    assert list(got) == expected(site.baseline, asked)


async def test_transfers_that_are_cut_are_made_again(site: Site) -> None:
    asked = long_requests(8, seed=400)
    site.tell_relay("delay 0.02")
    try:
        async with connected(site) as client:
            running = [asyncio.create_task(ask(client, ids, params)) for ids, params in asked]
            await asyncio.wait(running, timeout=0.3)  # in the middle of whatever is under way
            site.tell_relay("cut")
            got = await asyncio.gather(*running)
    finally:
        site.tell_relay("delay 0")
    assert list(got) == expected(site.baseline, asked)


async def test_a_node_that_was_cut_off_comes_back(site: Site) -> None:
    """Without a second decode worker its requests may fail, but in time and with the reason; then all is as before."""
    asked = requests(6, tokens=150)
    async with connected(site) as client:
        running = [asyncio.create_task(ask(client, ids, params)) for ids, params in asked]
        await asyncio.wait(running, timeout=0.3)
        site.network.link(2, up=False)
        try:
            async with asyncio.timeout(10 * LEASE_S):
                while by_role((await client.status()).workers) != (2, 0):
                    await asyncio.sleep(0.1)  # its lease ends by itself
        finally:
            site.network.link(2, up=True)
        async with asyncio.timeout(60.0):
            ended = await asyncio.gather(*running, return_exceptions=True)
        for got, answer in zip(ended, expected(site.baseline, asked), strict=True):
            assert got == answer or isinstance(got, PdserveError), got
        await settled(client, WORKERS)
        assert await ask(client, *asked[0]) == expected(site.baseline, asked[:1])[0]
