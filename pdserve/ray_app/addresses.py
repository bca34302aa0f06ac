"""Where a replica listens: on its node's address, on ports of the configured range."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

import ray
from ray.serve._private import replica

from pdserve.errors import ConfigError

ANY = ("0.0.0.0", "::")


def node_host(host: str) -> str:
    """The interface to listen on: for "any" only the one that Ray uses on this node, which others reach it by."""
    return str(ray.util.get_node_ip_address()) if host in ANY else host


def listen_where_ray_does() -> None:
    """Keeps Serve's own server of this replica on the node's address.

    Serve opens, after the constructor, a port for calls between deployments, on every interface
    whatever address Ray was given; whoever reaches it can run code. There is no setting for it.
    """
    node = ray.util.get_node_ip_address()
    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", node))


def port_range(text: str) -> range:
    """ "8500-8599" -> range(8500, 8600); empty: an empty one. Raises ConfigError."""
    if not text:
        return range(0)
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536):
        raise ConfigError(f"{text!r} is not a range of ports", field="pools.ports", remedy='write "8500-8599"')
    return range(int(low), int(high) + 1)


class Ports:
    """Ports of one range that no other process of this machine has taken in the same way.

    A port stays taken until `close`, or until this process ends.
    """

    def __init__(self, allowed: range) -> None:
        self._allowed = allowed
        self._locks: list[IO[bytes]] = []

    def take(self, host: str) -> int:
        """A free port; 0, which means any, when no range is set. Raises ConfigError when all are in use."""
        if not self._allowed:
            return 0
        for port in self._allowed:
            if self._lock(port):
                if _is_free(host, port):
                    return port
                self._locks.pop().close()
        raise ConfigError(
            f"every port from {self._allowed[0]} to {self._allowed[-1]} is in use on {host}",
            reason="NO_PORT",
            field="pools.ports",
            remedy="widen the range: a prefill worker takes one port, a decode worker two, a metrics page one",
        )

    def close(self) -> None:
        while self._locks:
            self._locks.pop().close()

    def _lock(self, port: int) -> bool:
        """Between two replicas that start at the same time: both would find the port free."""
        folder = Path(tempfile.gettempdir()) / f"pdserve-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = (folder / str(port)).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._locks.append(file)
        return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As gRPC binds: a port whose last connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
