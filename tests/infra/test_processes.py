"""The images' entry points, started with a manifest's own commands, arguments, variables and configuration.

Each pod gets a loopback address of its own, so that every port is the manifest's; names of services become
addresses, paths lie under a temporary folder, and the model is a tiny one. Certificates are those that
`pdserve certificates` makes, each part sees its own role's, and the Redis has TLS.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis

from pdserve.client import AsyncClient
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.request import SamplingParams
from pdserve.rpc.tls import CLIENT, OPERATOR
from tests.e2e.processes import check_free, until
from tests.engine.tiny import spec, tiny_model
from tests.infra.manifests import Document, Pod, missing, of_kind, pods, render
from tests.infra.program import MOUNT, VARIABLE
from tests.rpc.certificates import make_certificates, rpc_of

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
        (folder / "bin" / "redis-server").symlink_to(redis_with_tls())
        redis, router = self._services["pdserve-redis"], self.hosts["router"]
        self.certificates = make_certificates(folder / "certificates", "--redis", redis, "--host", router)
        checkpoint = folder / "tiny.pdmodel"
        model = tiny_model(spec(context_limit=512))
        save_spec_checkpoint(checkpoint, model.spec, model.tensors)
        ((name, text),) = of_kind(documents, "ConfigMap")[0]["data"].items()
        text = text.replace('"smollm2"', f'"{checkpoint}"')
        for service, host in self._services.items():
            text = text.replace(f"@{service}:", f"@{host}:").replace(f"//{service}:", f"//{host}:")
        for pod in self.pods.values():  # each with its own role's certificate
            (self.home(pod.component) / name).write_text(self._mounted(pod, text))

    def home(self, component: str) -> Path:
        made = self._folder / component
        made.mkdir(exist_ok=True)
        return made

    def _mounted(self, pod: Pod, text: str) -> str:
        """With the folder of the certificate that the pod mounts, in place of where it does."""
        for volume in pod.spec["volumes"]:
            if "secret" in volume:
                role = volume["secret"]["secretName"].removeprefix("pdserve-").removesuffix("-tls")
                (place,) = [m["mountPath"] for m in pod.container["volumeMounts"] if m["name"] == volume["name"]]
                text = text.replace(place, str(self.certificates / role))
        return text

    def _environment(self, component: str) -> dict[str, str]:
        pod, host = self.pods[component], self.hosts[component]
        values = {"POD_IP": host, "POD_NAME": f"{component}-0"}
        env = pod.container.get("env", [])
        given = {each["name"]: each.get("value", values.get(each["name"], SECRET)) for each in env}
        given = {name: VARIABLE.sub(lambda match: given[match[1]], value) for name, value in given.items()}
        given = {name: self._mounted(pod, value) for name, value in given.items()}
        return given | {
            "PATH": f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self._folder),
        }

    def start(self, component: str) -> None:
        pod = self.pods[component]
        container, host, given = pod.container, self.hosts[component], self._environment(component)
        words = [
            VARIABLE.sub(lambda match: given[match[1]], each) for each in (*container["command"], *container["args"])
        ]
        with (self._folder / f"{component}.log").open("wb") as log:
            self._processes[component] = subprocess.Popen(
                [self._here(pod, word, host) for word in words],
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _here(self, pod: Pod, word: str, host: str) -> str:
        word = self._mounted(pod, word).replace(MOUNT, str(self.home(pod.component)))
        word = word.replace("--dir /data", f"--dir {self._folder / 'data'}")
        return word.replace("--tls-port 6379", f"--tls-port 6379 --bind {host}").replace("0.0.0.0", host)

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

    def probe(self, component: str, name: str) -> bool:
        """What the kubelet would make of it: it does not look at who signed a certificate."""
        container = self.pods[component].container
        if "exec" in container[name]:
            command, given = container[name]["exec"]["command"], self._environment(component)
            return not subprocess.run(command, env={**os.environ, **given}, timeout=60).returncode
        get = container[name]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == get["port"]]
        url = f"{get['scheme'].lower()}://{self.hosts[component]}:{port}{get['path']}"
        anybody = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(url, timeout=10, context=anybody) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    def health(self, address: str, *words: str) -> int:
        """The exit status, asked by the client's certificate or by what `words` say."""
        command = [sys.executable, "-m", "pdserve.cli", "health", address, *words]
        return subprocess.run(command, timeout=60, stdout=subprocess.DEVNULL).returncode

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
        http = running.wait_listening("router", "http")
        assert running.probe("router", "livenessProbe")
        client_files = running.certificates / CLIENT
        async with AsyncClient(gateway, rpc_of(running.certificates, OPERATOR), api_key=SECRET) as client:
            await until(client, lambda status: running.check_alive() and len(status.workers) == 2, START_S)
            await until(client, lambda status: any(pair.fits for pair in status.pairs), START_S)
            assert running.probe("router", "readinessProbe")
            workers = {worker.worker_id: worker for worker in (await client.status()).workers}
            assert set(workers) == {"prefill-0", "decode-0"}, "the pods' names"
            for component in ("prefill", "decode"):
                address = running.wait_listening(component, "grpc")
                assert workers[f"{component}-0"].addresses[0] == address, "others reach it by the pod's address"
                assert running.probe(component, "readinessProbe") and running.probe(component, "livenessProbe")
                assert running.health(address, "--tls", str(client_files), "--role", "worker") == 0
                assert running.health(address) == 1, "nothing is said in clear"
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            done = await client.complete(token_ids=tuple(range(1, 40)), sampling=params)
            assert done.usage.output_tokens == 4
            await check_free(client, rpc=rpc_of(running.certificates, OPERATOR))
        trusting = ssl.create_default_context(cafile=client_files / "ca.crt")
        headers = {"authorization": f"Bearer {SECRET}"}
        async with httpx.AsyncClient(verify=trusting, headers=headers) as outside:
            assert (await outside.get(f"https://{http}/v1/models")).status_code == 200
        assert not in_clear(running.wait_listening("redis", "redis"))
        assert [running.stop(component) for component in ("router", "prefill", "decode", "redis")] == [0, 0, 0, 0]
        assert running.health(gateway, "--tls", str(client_files)) == 1


def in_clear(address: str) -> bool:
    """Whether a Redis there answers without TLS."""
    host, _, port = address.rpartition(":")
    with redis.Redis(host=host, port=int(port), password=SECRET, socket_timeout=5.0) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def redis_with_tls() -> str:
    """Debian's has it; the wheel's has not."""
    found = shutil.which("redis-server")
    if found is None:
        missing("redis-server", "install one with TLS, such as Debian's")
    assert found is not None
    return found
