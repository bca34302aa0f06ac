"""A deployment on this machine: the router as a process of its own, the pools on Ray.

    start():  router process -> its ready line -> Ray -> one Serve application per pool
    stop():   applications deleted (their replicas drain) -> Ray, if it was ours -> router

Whatever start() began is undone by stop(), after a failure too.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from pdserve.cli.ray_pools import RayPools, Say, attach, start_own, stop_pools, with_registry
from pdserve.cli.resources import check_own
from pdserve.client import Client
from pdserve.config import Config, operator_key
from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.rpc.settings import join_address, split_address

ROUTER_START_S = 30.0
ROUTER_STOP_S = 60.0
ROUTER_EXIT_S = 2.0  # between the end of its standard output and its own
POLL_S = 0.1
ANY_INTERFACE = ("0.0.0.0", "::")


class Deployment:
    """Use as a context manager: entering starts everything, leaving stops it."""

    def __init__(self, config: Config, config_path: Path | None, say: Say) -> None:
        self._config = config
        self._config_path = config_path
        # In a Ray job (and wherever Ray's own variable says so) the cluster is there already.
        self._cluster = config.pools.ray_address or ("auto" if os.environ.get("RAY_ADDRESS") else "")
        self._say = say
        self._router: subprocess.Popen[str] | None = None
        self._ray_is_ours = False
        self._pools: RayPools | None = None
        self.ray_address = ""  # of the cluster's head
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
        self._plan = self._config.plan()
        if not self._cluster:
            check_own(pools, os.cpu_count() or 1)
        self._say("starting the router")
        self._start_router()
        self._say("starting Ray")
        self._start_ray()
        self._say(f"starting {pools.prefill} prefill and {pools.decode} decode workers")
        self._start_pools()
        self._wait_ready(pools.prefill, pools.decode)

    def wait(self, stopping: threading.Event) -> None:
        """Returns when told to stop; raises Unavailable when the router has died."""
        while not stopping.wait(0.5):
            self._check_router()

    def stop(self) -> None:
        """Idempotent. Requests in flight get the pools' grace periods."""
        if self._pools is not None:
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
            for pipe in (self._router.stdin, self._router.stdout):
                if pipe is not None:
                    pipe.close()
            self._router = None

    def _start_router(self) -> None:
        settings = self._config.router
        arguments = ["--port", str(settings.port), "--http-port", str(settings.http_port)]
        arguments += ["--disaggregate", settings.disaggregate]
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
        self.gateway = _from_here(words[words.index("grpc") + 1])
        self.http = _from_here(words[words.index("http") + 1].removeprefix("http://"))
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
        if self._cluster:
            attach(self._cluster)
        else:
            self._ray_is_ours = True
            start_own(self._config.pools, self._plan)
        import ray

        self.ray_address = str(ray.get_runtime_context().gcs_address)

    def _start_pools(self) -> None:
        gateway = self.gateway
        if self._config.router.host in ANY_INTERFACE:
            import ray

            gateway = join_address(ray.util.get_node_ip_address(), split_address(gateway)[1])
        pools = RayPools(with_registry(self._config, gateway))
        pools.check_cluster(not self._ray_is_ours, self._say)
        pools.check_free()
        self._pools = pools  # from here on there is something to stop
        pools.start()

    def _wait_ready(self, prefill: int, decode: int) -> None:
        """Until the router sees every worker: ready in Ray's eyes is not yet ready for a request."""
        deadline = time.monotonic() + self._config.pools.ready_timeout_s
        pause = threading.Event()
        with Client(self.gateway, self._config.router.rpc, api_key=operator_key(self._config_path)) as client:
            while True:
                workers = [worker for worker in client.status().workers if worker.state == "ready"]
                ready = [worker.role for worker in workers]
                if ready.count("prefill") >= prefill and ready.count("decode") >= decode:
                    self.model = ", ".join(sorted({worker.model for worker in workers}))
                    return
                self._check_router()
                if self._pools is not None:
                    self._pools.check()
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{ready.count('prefill')} of {prefill} prefill and {ready.count('decode')} of {decode} "
                        "decode workers became ready in time",
                        reason="NOT_READY",
                        field="pools",
                        remedy="ask for fewer workers or CPUs, or raise pools.ready_timeout_s",
                    )
                pause.wait(POLL_S)

    def _stop_pools(self) -> None:
        from pdserve.cluster.installed import generations

        # All of them: an update has put others in the place of the first.
        stop_pools(generations(), self._say)
        self._pools = None


def _from_here(address: str) -> str:
    """Where this machine reaches what listens on every interface."""
    host, port = split_address(address)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


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
        with process.stderr:
            for line in process.stderr:
                sys.stderr.write(line)

    threading.Thread(target=copy, daemon=True).start()


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set. Call it after Ray has started, which sets handlers of its own."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    return stopping
