"""The images' entry points, started with a manifest's own commands, arguments, variables and configuration.

Each pod gets a loopback address of its own, so that every port is the manifest's; names of services become
addresses, paths lie under a temporary folder, and the model is a tiny one.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.request import SamplingParams
from tests.e2e.processes import check_free, until
from tests.engine.tiny import spec, tiny_model
from tests.infra.manifests import Document, of_kind, pods, render
from tests.infra.program import MOUNT, VARIABLE
from tests.redis_server import redis_binary

START_S = 120.0
STOP_S = 60.0
SECRET = "a-secret-of-sufficient-length"


class Cluster:
    """The pods of one overlay, one each, as processes of this machine."""

    def __init__(self, documents: list[Document], folder: Path) -> None:
        self._folder = folder
        self.pods = {pod.component: pod for pod in pods(documents)}
        # Another run of this test has other addresses.
        net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self.hosts = {component: f"{net}.{n}" for n, component in enumerate(self.pods, 2)}
        self._services = {
            service["metadata"]["name"]: self.hosts[service["spec"]["selector"]["app.kubernetes.io/component"]]
            for service in of_kind(documents, "Service")
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "data").mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "redis-server").symlink_to(redis_binary())
        checkpoint = folder / "tiny.pdmodel"
        model = tiny_model(spec(context_limit=512))
        save_spec_checkpoint(checkpoint, model.spec, model.tensors)
        for name, text in of_kind(documents, "ConfigMap")[0]["data"].items():
            text = text.replace('"smollm2"', f'"{checkpoint}"')
            for service, host in self._services.items():
                text = text.replace(f"@{service}:", f"@{host}:").replace(f"//{service}:", f"//{host}:")
            (folder / name).write_text(text)

    def start(self, component: str) -> None:
        pod = self.pods[component]
        container, host = pod.container, self.hosts[component]
        values = {"POD_IP": host, "POD_NAME": f"{component}-0"}
        given = {each["name"]: each.get("value", values.get(each["name"], SECRET)) for each in container.get("env", [])}
        given |= {
            "PATH": f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self._folder),
        }
        words = [
            VARIABLE.sub(lambda match: given[match[1]], each) for each in (*container["command"], *container["args"])
        ]
        with (self._folder / f"{component}.log").open("wb") as log:
            self._processes[component] = subprocess.Popen(
                [self._here(word, host) for word in words],
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _here(self, word: str, host: str) -> str:
        word = word.replace(MOUNT, str(self._folder)).replace("--dir /data", f"--dir {self._folder / 'data'}")
        return word.replace("--port 6379", f"--port 6379 --bind {host}").replace("0.0.0.0", host)

    def wait_listening(self, component: str, name: str) -> str:
        """host:port of a named port, once somebody answers there. Raises AssertionError with the log otherwise."""
        (port,) = [each["containerPort"] for each in self.pods[component].container["ports"] if each["name"] == name]
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((self.hosts[component], port), timeout=1.0).close()
                return f"{self.hosts[component]}:{port}"
            except OSError:
                log = self._folder / f"{component}.log"
                assert self._processes[component].poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)  # another process is watched from outside

    def check_alive(self) -> bool:
        """Raises AssertionError with the log of a process that has ended."""
        for component, process in self._processes.items():
            assert process.poll() is None, f"{component}: {(self._folder / f'{component}.log').read_text()}"
        return True

    def probe(self, component: str, name: str) -> int:
        """The HTTP status that the kubelet would see."""
        container = self.pods[component].container
        get = container[name]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == get["port"]]
        try:
            with urllib.request.urlopen(f"http://{self.hosts[component]}:{port}{get['path']}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def pdserve(self, *words: str) -> int:
        return subprocess.run(
            [sys.executable, "-m", "pdserve.cli", *words], timeout=60, stdout=subprocess.DEVNULL
        ).returncode

    def stop(self, component: str) -> int:
        """The exit status after SIGTERM."""
        process = self._processes.pop(component)
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_S)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(STOP_S)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(render("plain"), folder)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.redis
@pytest.mark.slow
async def test_the_plain_manifests_serve_a_request(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        running.start("redis")
        running.wait_listening("redis", "redis")
        for component in ("router", "prefill", "decode"):
            running.start(component)
        gateway = running.wait_listening("router", "grpc")
        running.wait_listening("router", "http")
        assert running.probe("router", "livenessProbe") == 200
        async with AsyncClient(gateway, api_key=SECRET) as client:
            await until(client, lambda status: running.check_alive() and len(status.workers) == 2, START_S)
            await until(client, lambda status: any(pair.fits for pair in status.pairs), START_S)
            assert running.probe("router", "readinessProbe") == 200
            workers = {worker.worker_id: worker for worker in (await client.status()).workers}
            assert set(workers) == {"prefill-0", "decode-0"}, "the pods' names"
            for component in ("prefill", "decode"):
                address = running.wait_listening(component, "grpc")
                assert workers[f"{component}-0"].addresses[0] == address, "others reach it by the pod's address"
                assert running.pdserve("health", address) == 0
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            done = await client.complete(token_ids=tuple(range(1, 40)), sampling=params)
            assert done.usage.output_tokens == 4
            await check_free(client)
        assert [running.stop(component) for component in ("router", "prefill", "decode", "redis")] == [0, 0, 0, 0]
        assert running.pdserve("health", gateway) == 1
