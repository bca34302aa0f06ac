"""A deployment on this machine: the router as a process of its own, the pools on Ray.

    start():  router process -> its ready line -> Ray -> one Serve application per pool
    stop():   applications deleted (their replicas drain) -> Ray, if it was ours -> router

Whatever start() began is undone by stop(), after a failure too.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pdserve.cli.ray_errors import pool_failure
from pdserve.cli.resources import check_all, check_own, check_replicas
from pdserve.client import Client
from pdserve.config import Config, operator_key
from pdserve.errors import ConfigError, PdserveError, Unavailable
from router.settings import RouterSettings

Say = Callable[[str], None]

# Read by Ray when it is imported or started; quiet, and without telemetry.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# A cluster of one machine: Ray then listens on loopback only, on Linux too despite the name.
# Whoever reaches Ray's ports can run code.
LOCAL_RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
ROUTER_START_S = 30.0
ROUTER_STOP_S = 60.0
ROUTER_EXIT_S = 2.0  # between the end of its standard output and its own
POLL_S = 0.1


class Deployment:
    """Use as a context manager: entering starts everything, leaving stops it."""

    def __init__(self, config: Config, config_path: Path | None, say: Say) -> None:
        self._config = config
        self._config_path = config_path
        self._say = say
        self._router: subprocess.Popen[str] | None = None
        self._ray_is_ours = False
        self._applications: list[str] = []
        self.gateway = ""
        self.http = ""
        self.model = ""  # the name it is served by

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once every worker is ready. Raises ConfigError or Unavailable with the reason."""
        pools = self._config.pools
        if not pools.ray_address:
            check_own(pools, os.cpu_count() or 1)
        self._say("starting the router")
        self._start_router()
        self._say("starting Ray")
        self._start_ray()
        self._check_cluster()
        self._say(f"starting {pools.prefill} prefill and {pools.decode} decode workers")
        self._start_pools()
        self._wait_ready(pools.prefill, pools.decode)

    def wait(self, stopping: threading.Event) -> None:
        """Returns when told to stop; raises Unavailable when the router has died."""
        while not stopping.wait(0.5):
            self._check_router()

    def stop(self) -> None:
        """Idempotent. Requests in flight get the pools' grace periods."""
        if self._applications:
            self._stop_pools()
        if self._ray_is_ours:
            import ray

            ray.shutdown()
            self._ray_is_ours = False
        if self._router is not None:
            self._router.terminate()
            try:
                self._router.wait(ROUTER_STOP_S)
            except subprocess.TimeoutExpired:
                self._router.kill()
                self._router.wait()
            self._router = None

    def _start_router(self) -> None:
        settings = self._config.router
        arguments = ["--port", str(settings.port), "--http-port", str(settings.http_port)]
        if self._config_path is not None:
            arguments += ["--config", str(self._config_path)]
        # A group of its own: Ctrl-C reaches us alone, and we stop it after the pools. Its standard
        # input is our end of a pipe: should we be killed, it ends too.
        self._router = subprocess.Popen(
            [sys.executable, "-m", "router", "--stop-with-stdin", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        line = _first_line(self._router, ROUTER_START_S)
        if not line:
            raise self._router_failure()
        words = line.split()
        self.gateway = words[words.index("grpc") + 1]
        self.http = words[words.index("http") + 1].removeprefix("http://")
        _forward(self._router)

    def _router_failure(self) -> PdserveError:
        assert self._router is not None and self._router.stderr is not None
        try:
            self._router.wait(ROUTER_EXIT_S)  # it has closed its output, or is silent
            late = False
        except subprocess.TimeoutExpired:
            self._router.kill()
            late = True
        text = self._router.stderr.read().strip().splitlines()
        last = text[-1].removeprefix("router: ") if text else ""
        if late:
            return Unavailable(
                f"the router did not start within {ROUTER_START_S:g} s{f'; its last line: {last}' if last else ''}",
                reason="ROUTER_START",
                remedy="try again on a machine with less load, or see what `python -m router` says",
            )
        remedy = "" if last else "see what `python -m router` says"
        return ConfigError(last or "the router ended before it was ready", reason="ROUTER", remedy=remedy)

    def _check_router(self) -> None:
        if self._router is not None and self._router.poll() is not None:
            raise Unavailable(
                f"the router ended with status {self._router.returncode}", reason="ROUTER_DIED", remedy="see its log"
            )

    def _start_ray(self) -> None:
        pools = self._config.pools
        wanted = RAY_ENVIRONMENT | ({} if pools.ray_address else LOCAL_RAY_ENVIRONMENT)
        os.environ.update({key: value for key, value in wanted.items() if key not in os.environ})
        import ray
        from ray import serve

        # The controller needs a CPU of its own to be placed; the figure is logical.
        cpus = int(pools.prefill * pools.prefill_cpus + pools.decode * pools.decode_cpus + 1)
        try:
            if pools.ray_address:
                ray.init(address=pools.ray_address, logging_level=logging.ERROR, log_to_driver=False)
            else:
                self._ray_is_ours = True
                ray.init(
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unavailable(f"Ray did not start: {first}", reason="RAY", field="pools.ray_address") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")

    def _check_cluster(self) -> None:
        """A cluster of our own never grows; one we have joined may, so there it is only said."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self._ray_is_ours:
            check_all(self._config.pools, nodes)
            return
        try:
            check_replicas(self._config.pools, nodes)
        except ConfigError as error:
            self._say(f"waiting for the cluster to grow: {error}")

    def _start_pools(self) -> None:
        from ray import serve

        from pdserve.ray_app import application, pools

        registry = self._config.prefill.registry
        if registry.url == "memory://":
            registry = replace(registry, url=f"grpc://{self.gateway}")
        config = replace(
            self._config,
            prefill=replace(self._config.prefill, registry=registry),
            decode=replace(self._config.decode, registry=registry),
            router=RouterSettings(),  # none of a worker's business, the tenants least of all
        )
        targets = []
        for pool in pools(config):
            self._applications.append(pool.application)
            targets.append(serve.RunTarget(application(config, pool), name=pool.application, route_prefix=None))
        try:
            # Not waited for here: _wait_ready tells which pool is late and why.
            serve.run_many(targets, wait_for_applications_running=False)
        except RuntimeError as error:
            raise Unavailable(f"Ray Serve refused the pools: {error}", reason="RAY_SERVE") from error

    def _wait_ready(self, prefill: int, decode: int) -> None:
        """Until the router sees every worker: ready in Ray's eyes is not yet ready for a request."""
        deadline = time.monotonic() + self._config.pools.ready_timeout_s
        pause = threading.Event()
        with Client(self.gateway, api_key=operator_key(self._config_path)) as client:
            while True:
                workers = [worker for worker in client.status().workers if worker.state == "ready"]
                ready = [worker.role for worker in workers]
                if ready.count("prefill") >= prefill and ready.count("decode") >= decode:
                    self.model = ", ".join(sorted({worker.model for worker in workers}))
                    return
                self._check_router()
                self._check_applications()
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{ready.count('prefill')} of {prefill} prefill and {ready.count('decode')} of {decode} "
                        "decode workers became ready in time",
                        reason="NOT_READY",
                        field="pools",
                        remedy="ask for fewer workers or CPUs, or raise pools.ready_timeout_s",
                    )
                pause.wait(POLL_S)

    def _check_applications(self) -> None:
        from ray import serve

        for name, overview in serve.status().applications.items():
            if name not in self._applications:
                continue
            if overview.status == "DEPLOY_FAILED":
                told = [deployment.message for deployment in overview.deployments.values() if deployment.message]
                raise pool_failure(name.removeprefix("pdserve-"), told[0] if told else overview.message)

    def _stop_pools(self) -> None:
        from ray import serve

        for name in self._applications:
            try:
                serve.delete(name)
            except (RuntimeError, TimeoutError) as error:
                self._say(f"{name} did not stop cleanly: {error}")
        self._applications = []


def _first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The first line a process prints; empty when it ends or stays silent."""
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        return lines.get(timeout=timeout_s)
    except queue.Empty:
        return ""


def _forward(process: subprocess.Popen[str]) -> None:
    """Copies the router's warnings to our standard error, so that its pipe never fills."""

    def copy() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)

    threading.Thread(target=copy, daemon=True).start()


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set. Call it after Ray has started, which sets handlers of its own."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    return stopping
