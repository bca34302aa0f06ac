"""One question to a server's health service: `python -m pdserve.rpc.health`, for probes that come every few seconds.

`pdserve health` asks the same, and takes three times as long to start. With certificates the probes that Kubernetes
has of its own cannot ask.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import PdserveError, Unavailable
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.rpc.tls import ROUTER, WORKER

DEFAULT = "127.0.0.1:8470"
Serving = health_pb2.HealthCheckResponse.ServingStatus


def check_health(address: str, tls: Path | None, role: str = ROUTER, service: str = "", timeout_s: float = 2.0) -> None:
    """Raises Unavailable unless the server says that it serves; ConfigError for an address or files of no use.

    Args:
        tls: a folder with tls.crt, tls.key and ca.crt; None: no TLS. The question has no secret in it, so that it may
            leave this machine in clear, as to a container's own address.
        role: with TLS, what must answer.
        service: empty: the server as a whole.
    """
    rpc = RpcSettings(tls=TlsSettings.of_folder(tls) if tls else TlsSettings(), allow_plaintext=True)
    with sync_channel(address, rpc, peer=role) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s).status
        except grpc.RpcError as error:
            raise Unavailable(
                f"{address} does not say that it is healthy: {error.code().name}", remedy="see its log"
            ) from None
    if status != Serving.SERVING:
        raise Unavailable(f"{address} says {Serving.Name(status)}", reason="NOT_SERVING", remedy="wait, or see its log")


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m pdserve.rpc.health", description="Ask whether a server serves.")
    parse.add_argument("address", nargs="?", default=os.environ.get("PDSERVE_HEALTH") or DEFAULT)
    parse.add_argument("--role", choices=(ROUTER, WORKER), default=ROUTER, help="what must answer, with TLS")
    parse.add_argument(
        "--tls", default=os.environ.get("PDSERVE_TLS") or None, type=Path, help="tls.crt, tls.key, ca.crt"
    )
    parse.add_argument("--service", default="", help="one service; empty: the server as a whole")
    parse.add_argument("--timeout-s", type=float, default=2.0)
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if it serves, else 1."""
    options = parser().parse_args(arguments)
    try:
        check_health(options.address, options.tls, options.role, options.service, options.timeout_s)
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # a probe's words are all that a kubelet shows
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
