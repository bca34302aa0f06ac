"""The systems that `benchmarks.serving` loads, each started with its processes and stopped with them.

All their processes, the load generator's included, share the cores that this process may use.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.completions import Ask, Outcome, StreamError, Target, post, stream
from benchmarks.peers.process import ROOT, VLLM_ENVIRONMENT, find_model, find_python

T = TypeVar("T")
START_S = 200.0
STOP_S = 15.0

# Its four transfer threads per server would poll on cores that its engines need.
NIXL = json.dumps(
    {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_threads": 0}}
)


class NotAvailable(Exception):
    """The system cannot be had on this machine; says why."""


class Processes:
    """Child processes, and a folder with their logs. Whoever makes one calls `stop`.

    Args:
        logs: is kept; None: a folder that goes with them.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if logs is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="pdserve-benchmark-")
            logs = Path(self._temporary.name)
        self.folder = logs
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running: list[tuple[str, asyncio.subprocess.Process]] = []

    def names(self) -> tuple[str, ...]:
        """Those that have not ended."""
        return tuple(name for name, process in self._running if process.returncode is None)

    def printed(self, name: str) -> str:
        """All that a process has printed so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def start(self, name: str, command: Sequence[object], environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *map(str, command),
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append((name, process))

    async def prints(self, name: str, pattern: str) -> re.Match[str]:
        """Waits until a process has printed a match. Raises NotAvailable when one ends or time is over."""
        began = time.monotonic()
        while (found := re.search(pattern, self.printed(name))) is None:
            self.check(time.monotonic() - began)
            await asyncio.sleep(0.05)
        return found

    async def answers(self, target: Target, path: str) -> None:
        """Waits until GET `path` is 200. Raises NotAvailable."""
        began = time.monotonic()
        while not await _is_ok(target, path):
            self.check(time.monotonic() - began)
            await asyncio.sleep(0.2)

    def check(self, waited_s: float = 0.0) -> None:
        """Raises NotAvailable if a process has ended, or has been waited for too long."""
        for name, process in self._running:
            if process.returncode is not None or waited_s > START_S:
                what = "ended" if waited_s <= START_S else "is not ready"
                raise NotAvailable(f"{name} {what}:\n{self.printed(name)[-3000:]}")

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of each process so far, its children included."""
        return {name: _cpu_seconds(process.pid) for name, process in self._running}

    def pid(self, name: str) -> int:
        return self._process(name).pid

    def send(self, name: str, number: signal.Signals) -> None:
        """To the process and all that it started."""
        _signal(self.pid(name), number)

    async def ended(self, name: str) -> int:
        """Waits until a process has ended, and keeps nothing of it but its log. Returns its status."""
        process = self._process(name)
        status = await process.wait()
        self._running.remove((name, process))
        return status

    def _process(self, name: str) -> asyncio.subprocess.Process:
        return next(process for known, process in self._running if known == name)

    async def stop(self) -> None:
        for _, process in self._running:
            _signal(process.pid, signal.SIGTERM)
            _signal(process.pid, signal.SIGCONT)
        for _, process in self._running:
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                _signal(process.pid, signal.SIGKILL)
                await process.wait()
        self._running.clear()
        if self._temporary is not None:
            self._temporary.cleanup()


@dataclass
class System:
    """A system that serves; made by `open_system`."""

    name: str
    targets: Sequence[Target]
    processes: Processes
    transfers: bool = False
    """The first target prefills, the second pulls its cache (vLLM's disaggregation)."""
    records: bool = False
    """It tells how it placed a request, when asked."""

    async def send(self, ask: Ask) -> Outcome:
        if not self.transfers:
            return await stream(self.targets[0], ask, **({"pdserve_record": True} if self.records else {}))
        return await _disaggregated(self.targets[0], self.targets[1], ask)


async def _disaggregated(prefill: Target, decode: Target, ask: Ask) -> Outcome:
    """What vLLM's proxy does, without its cost: one token from the first server, then a stream from the second."""
    sent = time.monotonic()
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = ask.body(prefill.model, stream=False, max_tokens=1, kv_transfer_params=asked)
    try:
        answer = await post(prefill, body)
    except (StreamError, OSError, EOFError, ValueError) as error:
        return Outcome(ask, sent, error=f"prefill: {error}")
    return await stream(decode, ask, sent, kv_transfer_params=answer.get("kv_transfer_params"))


async def start_pdserve(name: str, config: str, cores: Mapping[str, Sequence[int]]) -> System:
    """Router and workers with one configuration; without a prefill worker, decode does it all.

    Args:
        cores: worker (prefill, decode) -> the cores it may use. The router, and this process, may use decode's.
    """
    processes = Processes()
    try:
        file = processes.folder / "pdserve.toml"
        file.write_text(config)
        python = sys.executable
        router = [python, "-m", "router", "--config", file, "--http-port", 0, "--port", 0]
        with on_cores(cores["decode"]):
            await processes.start("router", router)
        ready = await processes.prints("router", r"router ready: grpc (\S+) http http://([^:]+):(\d+)")
        common = ["--config", file, "--registry", f"grpc://{ready[1]}"]
        for kind, own in cores.items():
            with on_cores(own):
                await processes.start(kind, [python, "-m", f"{kind}_worker", *common])
        target = Target(ready[2], int(ready[3]), "smollm2")
        await processes.answers(target, "/readyz")
    except BaseException:
        await processes.stop()
        raise
    return System(name, [target], processes, records=True)


async def start_vllm(name: str, arguments: Sequence[object], threads: int, disaggregated: bool = False) -> System:
    """`vllm serve`; disaggregated: a second one, and caches pulled over NIXL."""
    python, model = find_python("vllm"), find_model()
    if python is None or model is None:
        raise NotAvailable("vllm is not installed (make peers)")
    if disaggregated and not list(python.parents[1].glob("lib/python*/site-packages/nixl*")):
        raise NotAvailable("nixl is not installed in vllm's environment (make peers)")
    processes = Processes()
    targets = []
    try:
        for number in range(2 if disaggregated else 1):
            target = Target("127.0.0.1", _free_port(), "smollm2")
            environment = {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
            command: list[Any] = [
                python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                model,
                "--port",
                target.port,
            ]
            command += ["--host", target.host, "--served-model-name", target.model, "--dtype", "bfloat16"]
            command += ["--max-model-len", 4096, "--no-enable-log-requests", *arguments]
            if disaggregated:
                command += ["--kv-transfer-config", NIXL]
            await processes.start(f"{name}-{number}", command, environment)
            targets.append(target)
        for target in targets:
            await processes.answers(target, "/health")
    except BaseException:
        await processes.stop()
        raise
    return System(name, targets, processes, transfers=disaggregated)


def run_until_done(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, but SIGTERM cancels the work too, so that no process is left behind. Raises SystemExit then."""

    async def watched() -> T:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started within it may use these cores only; afterwards this thread has those it had."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _is_ok(target: Target, path: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _cpu_seconds(pid: int) -> float:
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _signal(pid: int, number: int) -> None:
    """To the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
