"""`pdserve health`: one question to a server's health service. Probes ask it by `python -m pdserve.rpc.health`."""

from __future__ import annotations

from typing import Annotated

import typer

from pdserve.cli.ask import TlsFolder
from pdserve.cli.console import out
from pdserve.rpc.health import DEFAULT, check_health
from pdserve.rpc.tls import ROUTER


def health(
    address: Annotated[str, typer.Argument(envvar="PDSERVE_HEALTH", help="host:port of a router or worker.")] = DEFAULT,
    service: Annotated[
        str, typer.Option(help="One service, such as pdserve.v1.Gateway; empty: the server as a whole.")
    ] = "",
    tls: TlsFolder = None,
    role: Annotated[str, typer.Option(help="With TLS: what must answer there, router or worker.")] = ROUTER,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 2.0,
) -> None:
    """Exit with 0 if a router or worker says that it serves, else with 1. Without TLS Kubernetes can ask the same."""
    check_health(address, tls, role, service, timeout_s)
    out.print(f"{address} serves")
