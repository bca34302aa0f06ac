"""`ray start`, `serve deploy` and `ray job submit` as an operator types them, on their own cluster, with the files of
docs/deploy.md: mutual TLS between all parts.

The router is a deployment like the pools; when it is killed, workers find the one that replaces it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pdserve.client import AsyncClient
from pdserve.config import load_config, merge
from pdserve.errors import PdserveError, Unavailable
from pdserve.local import LocalRunner
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.tls import OPERATOR
from tests.ray.asking import ask, by_role, expected, long_requests, requests, settled, tables, write_model
from tests.ray.conftest import local_runner
from tests.ray.test_replicas import follow
from tests.ray.test_sizes import toml
from tests.rpc.certificates import make_certificates, rpc_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_S = 60.0


@dataclass(frozen=True)
class Cluster:
    folder: Path
    environment: dict[str, str]
    dashboard: str
    gateway: str
    baseline: LocalRunner
    rpc: RpcSettings  # an operator's

    def run(self, *command: str) -> str:
        """A command; returns what it says. It must succeed."""
        program, *rest = command
        done = subprocess.run(
            [str(Path(sys.executable).with_name(program)), *rest],
            env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node of Ray, started for this module; nothing of it is left."""
    folder = tmp_path_factory.mktemp("cluster")
    session = Path(tempfile.mkdtemp(prefix="pdray"))  # short: it holds Ray's sockets
    gcs, dashboard, agent, grpc_port, http_port = free_ports(5)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"http://{HOST}:{dashboard}"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["XDG_RUNTIME_DIR"] = str(session)  # of the doors that `pdserve drain` knocks at
    config, certificates = folder / "pdserve.toml", make_certificates(folder / "certificates", "--host", HOST)
    written = files_of_the_page(folder, certificates)
    (folder / "serve.yaml").write_text(written["serve.yaml"])
    made = merge(tomllib.loads(written["pdserve.toml"]), tables(write_model(folder / "tiny.pdmodel", seed=0)))
    made["router"] |= {"port": grpc_port, "http_port": http_port}
    for part in ("router", "prefill", "decode"):  # Ray would take this machine's other address
        assert made[part]["host"] == "0.0.0.0"
        made[part]["host"] = HOST
    made["scaling"] = {}
    made["pools"] = {"prefill": 1, "decode": 1, "prefill_cpus": 0.5, "decode_cpus": 0.5, "router_cpus": 0.5}
    config.write_text(toml(made))
    log = (folder / "ray.log").open("w")
    ray = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--port", str(gcs), "--node-ip-address",
         HOST, "--dashboard-host", HOST, "--dashboard-port", str(dashboard),
         # Another Ray on this machine may have the agent's usual port, and jobs would find no agent.
         "--dashboard-agent-listen-port", str(agent), "--temp-dir", str(session), "--num-cpus",
         "4", "--object-store-memory", "100000000", "--disable-usage-stats"],
        env={**environment, "RAY_ADDRESS": ""}, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        until_there(f"http://{HOST}:{dashboard}/api/version", ray)
        yield Cluster(
            folder, environment, f"http://{HOST}:{dashboard}", f"{HOST}:{grpc_port}", local_runner(load_config(config)),
            rpc_of(certificates, OPERATOR),
        )  # fmt: skip
    finally:
        processes = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
        for process in processes:
            if process.is_running():
                process.kill()
        _, left = psutil.wait_procs(processes, timeout=20.0)
        assert not left, left
        ray.wait(10.0)
        log.close()
        shutil.rmtree(session, ignore_errors=True)


def files_of_the_page(folder: Path, certificates: Path) -> dict[str, str]:
    """Those that docs/deploy.md writes for a Ray cluster, in this folder and with these certificates."""
    section = (ROOT / "docs" / "deploy.md").read_text().partition("\n## A Ray cluster\n")[2]
    found = re.findall(r"^cat > (\S+) <<END\n(.*?)^END$", section, re.MULTILINE | re.DOTALL)
    places = (("$PWD", str(folder)), ("/etc/pdserve", str(certificates)))
    return {name: functools.reduce(lambda text, place: text.replace(*place), places, text) for name, text in found}


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def until_there(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(int(START_S / 0.2)):
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as asks_for_a_token:
            asks_for_a_token.close()
            return
        except (urllib.error.URLError, OSError):
            pass
        try:
            raise AssertionError(f"ray start ended with {process.wait(0.2)}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("Ray's dashboard is not there")


async def served(cluster: Cluster) -> None:
    """A pair of workers of this cluster answers as one process does."""
    asked = requests(4, tokens=12)
    async with asyncio.timeout(90.0):
        while True:
            async with AsyncClient(cluster.gateway, cluster.rpc) as client:
                try:
                    assert by_role(await settled(client, 2, rpc=cluster.rpc)) == (1, 1)
                    got = [await ask(client, ids, params) for ids, params in asked]
                    break
                except PdserveError:
                    await asyncio.sleep(0.1)  # Ray is watched from outside
    assert got == expected(cluster.baseline, asked)


def listener(address: str) -> int:
    """Process that listens there."""
    port = int(address.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    found = {c.pid for c in listening if c.laddr and c.laddr.port == port}
    (pid,) = found - {None}
    return int(pid or 0)


async def test_serve_deploy_brings_up_router_and_pools_and_survives_its_router(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.run, "serve", "deploy", "serve.yaml", "--address", cluster.dashboard)
    await served(cluster)
    async with AsyncClient(cluster.gateway) as in_clear:
        with pytest.raises(Unavailable):
            await in_clear.models()
    os.kill(listener(cluster.gateway), signal.SIGKILL)
    await served(cluster)


async def test_a_batch_runs_as_a_job(cluster: Cluster) -> None:
    asked = long_requests(4, seed=700)
    lines = [
        {"id": n, "token_ids": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for n, (ids, _) in enumerate(asked)
    ]
    source, target = cluster.folder / "in.jsonl", cluster.folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    script = str(ROOT / "examples" / "batch.py")
    job = (sys.executable, script, str(source), str(target), "--gateway", cluster.gateway)
    flags = ("--config", str(cluster.folder / "pdserve.toml"))
    said = await asyncio.to_thread(cluster.run, "ray", "job", "submit", "--", *job, *flags)
    assert "succeeded" in said and "answered 4 of 4" in said
    answers = {row["id"]: tuple(row["token_ids"]) for row in map(json.loads, target.read_text().splitlines())}
    assert answers == dict(enumerate(expected(cluster.baseline, asked)))


async def test_a_pod_drains_before_ray_is_told_to_stop_and_no_answer_is_lost(cluster: Cluster) -> None:
    """What `preStop` runs in infra/k8s/ray."""
    asked = requests(6, tokens=200)
    async with AsyncClient(cluster.gateway, cluster.rpc) as client:
        begun = [asyncio.Event() for _ in asked]
        streams = [
            asyncio.create_task(follow(client, ids, params, event))
            for (ids, params), event in zip(asked, begun, strict=True)
        ]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*(event.wait() for event in begun))
        said = await asyncio.to_thread(cluster.run, "pdserve", "drain", "--timeout-s", "60")
        assert "workers drained: 2" in said
        assert await asyncio.gather(*streams) == expected(cluster.baseline, asked)
        with pytest.raises(PdserveError):
            await ask(client, *asked[0])
