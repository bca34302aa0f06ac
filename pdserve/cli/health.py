"""`pdserve health`: one question to a server's health service, for probes that run a command."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.ask import TlsFolder, rpc_settings
from pdserve.cli.console import out
from pdserve.errors import Unavailable
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.tls import ROUTER

Serving = health_pb2.HealthCheckResponse.ServingStatus


def health(
    address: Annotated[
        str, typer.Argument(envvar="PDSERVE_HEALTH", help="host:port of a router or worker.")
    ] = "127.0.0.1:8470",
    service: Annotated[
        str, typer.Option(help="One service, such as pdserve.v1.Gateway; empty: the server as a whole.")
    ] = "",
    tls: TlsFolder = None,
    role: Annotated[str, typer.Option(help="With TLS: what must answer there, router or worker.")] = ROUTER,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 2.0,
) -> None:
    """Exit with 0 if a router or worker says that it serves, else with 1. Kubernetes can ask the same by gRPC."""
    # A question without a secret: it may leave this machine in clear, as to a container's own address.
    rpc = rpc_settings(tls, plaintext=True)
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
    out.print(f"{address} serves")
