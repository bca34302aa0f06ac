"""Machines with their own addresses: network namespaces on one bridge, by Debian's iproute2.

Everything has a name of its own for each process of tests, and `close` removes it, whatever became of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from pdserve.cli.ray_pools import LOCAL_RAY_ENVIRONMENT

LEAVE_S = 5.0


class NotPermitted(Exception):
    """This machine lets us make no networks; the text is the reason."""


class Network:
    """`machines` namespaces at 10.N.0.1, 10.N.0.2, ...; this process is at 10.N.0.254. A context manager."""

    def __init__(self, machines: int) -> None:
        self._number = 64 + os.getpid() % 128
        self._tag = f"pd{os.getpid() % 100_000}"
        self._machines = range(1, machines + 1)
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def address(self, machine: int) -> str:
        return f"10.{self._number}.0.{machine}"

    def command(self, machine: int, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(machine), *arguments]

    def spawn(
        self, machine: int, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[str]:
        """A process on a machine; its standard error goes to a file. `close` ends it."""
        with log.open("w") as errors:
            process = subprocess.Popen(
                self.command(machine, *arguments),
                env={**_inherited(), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def link(self, machine: int, up: bool) -> None:
        """The cable of a machine: pulled, or put back."""
        _run("ip", "link", "set", self._port(machine), "up" if up else "down")

    def limit(self, machine: int, megabits: float | None) -> None:
        """How fast a machine may be sent to; None: no limit."""
        if megabits is None:
            _run("tc", "qdisc", "del", "dev", self._port(machine), "root")
            return
        shape = ("rate", f"{round(megabits * 1000)}kbit", "burst", "16kb", "latency", "200ms")
        _run("tc", "qdisc", "replace", "dev", self._port(machine), "root", "tbf", *shape)

    def close(self) -> None:
        """Ends every process on the machines and removes them. Idempotent."""
        for machine in self._machines:
            self._end_processes(machine)
        for process in self._processes:
            process.wait(LEAVE_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes = []
        for machine in self._machines:
            _run("ip", "link", "del", self._port(machine), check=False)
            _run("ip", "netns", "del", self._namespace(machine), check=False)
        _run("ip", "link", "del", self._tag, check=False)

    def left(self) -> list[str]:
        """What `close` should have removed."""
        names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [line for line in (*names.splitlines(), *spaces.splitlines()) if self._tag in line]

    def _make(self) -> None:
        if not all(map(shutil.which, ("ip", "tc"))):
            raise NotPermitted("ip and tc are missing (Debian: iproute2)")
        if sys.platform != "linux" or os.geteuid() != 0:
            raise NotPermitted("network namespaces need root on Linux")
        _run("ip", "link", "add", self._tag, "type", "bridge")
        _run("ip", "addr", "add", f"{self.address(254)}/24", "dev", self._tag)
        _run("ip", "link", "set", self._tag, "up")
        for machine in self._machines:
            space, port, cable = self._namespace(machine), self._port(machine), f"{self._tag}c{machine}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", cable, "netns", space)
            _run("ip", "link", "set", port, "master", self._tag, "up")
            _run(*self.command(machine, "ip", "addr", "add", f"{self.address(machine)}/24", "dev", cable))
            for device in (cable, "lo"):
                _run(*self.command(machine, "ip", "link", "set", device, "up"))

    def _end_processes(self, machine: int) -> None:
        end = time.monotonic() + LEAVE_S
        while pids := _pids(self._namespace(machine)):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            assert time.monotonic() < end, f"machine {machine} keeps {pids}"
            time.sleep(0.05)  # processes that are not ours to wait for

    def _namespace(self, machine: int) -> str:
        return f"{self._tag}n{machine}"

    def _port(self, machine: int) -> str:
        return f"{self._tag}p{machine}"


def _pids(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise NotPermitted(f"`{' '.join(command)}`: {done.stderr.strip()}")


def _inherited() -> dict[str, str]:
    """This process's environment, less what a command line that ran in it has set for a Ray of one machine."""
    return {name: value for name, value in os.environ.items() if name not in LOCAL_RAY_ENVIRONMENT}
