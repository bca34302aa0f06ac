"""`pdserve up` and `pdserve down`: a whole deployment on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.console import err, progress
from pdserve.cli.deployment import Deployment, stop_on_signals
from pdserve.cli.preflight import check_before_start
from pdserve.cli.state import Running, hold, publish, read_running
from pdserve.config import load_config
from pdserve.errors import DeadlineExceeded, Unavailable

Option = typer.Option


def up(
    config: Annotated[Path | None, Option(help="TOML file; without one, defaults that suit a laptop.")] = None,
    model: Annotated[str, Option(help="Checkpoint: directory, .gguf or .pdmodel; 'smollm2' is the packaged one.")] = "",
    prefill: Annotated[int | None, Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, Option(help="Decode workers.")] = None,
    port: Annotated[int | None, Option(help="Port of the gRPC gateway; 0: any free one.")] = None,
    http_port: Annotated[int | None, Option(help="Port of the OpenAI endpoint; 0: any free one.")] = None,
    disaggregate: Annotated[str | None, Option(help="Who computes prompts: always, never or auto.")] = None,
) -> None:
    """Start pools and router, and stay until Ctrl-C or `pdserve down`.

    \b
    pdserve up
    pdserve up --prefill 2 --decode 2 --model ./my-checkpoint
    pdserve up --config pdserve.toml
    """
    settings = load_config(config, overrides(model, prefill, decode, port, http_port, disaggregate))
    check_before_start(settings)
    _exit_on_terminate()
    with hold() as file, Deployment(settings, config, lambda text: err.print(text)) as deployment:
        publish(file, Running(os.getpid(), deployment.gateway, deployment.http, deployment.ray_address))
        stopping = stop_on_signals()
        where = f"gRPC {deployment.gateway}, OpenAI http://{deployment.http}/v1"
        err.print(f"ready: {where}, model {deployment.model}", style="green", markup=False)
        scheme = "https" if settings.router.rpc.tls.enabled else "http"
        err.print(f"watch: {scheme}://{deployment.http}/ui, or `pdserve top`", highlight=False)
        err.print("stop with Ctrl-C or `pdserve down`", highlight=False)
        deployment.wait(stopping)
        err.print("stopping: requests in flight may finish")


def overrides(
    model: str,
    prefill: int | None,
    decode: int | None,
    port: int | None,
    http_port: int | None,
    disaggregate: str | None = None,
) -> dict[str, Any]:
    """The configuration tables that the flags stand for."""
    tables: dict[str, Any] = {
        "model": {"path": model or None},
        "pools": {"prefill": prefill, "decode": decode},
        "router": {"port": port, "http_port": http_port, "disaggregate": disaggregate},
    }
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}


def down(
    timeout_s: Annotated[float, Option(help="Seconds to wait for requests in flight.")] = 120.0,
) -> None:
    """Stop the `pdserve up` of this machine; requests in flight may finish."""
    running = read_running()
    if running is None:
        raise Unavailable("no `pdserve up` is running here", reason="NOT_UP", remedy="there is nothing to stop")
    os.kill(running.pid, signal.SIGTERM)
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    with progress("waiting for requests in flight"):
        while read_running() is not None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"process {running.pid} is still stopping",
                    reason="STILL_STOPPING",
                    field="timeout_s",
                    remedy="raise --timeout-s",
                )
            pause.wait(0.1)
    err.print("stopped")


def _exit_on_terminate() -> None:
    """Until the deployment is ready SIGTERM ends us like Ctrl-C, so that what was started is stopped."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
