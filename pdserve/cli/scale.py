"""`pdserve scale` and `pdserve update`: other sizes, or another model, while requests are served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.console import err, progress
from pdserve.cli.pools import overrides
from pdserve.cli.ray_pools import attach, with_registry
from pdserve.cli.state import Running, read_running
from pdserve.config import load_config, operator_key
from pdserve.errors import ConfigError

Option = typer.Option

RAY_HELP = "Ray cluster, host:port; empty: that of the running `pdserve up`, or of this machine."


def scale(
    prefill: Annotated[int | None, Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, Option(help="Decode workers.")] = None,
    auto: Annotated[bool, Option("--auto", help="Give sizes back to the configuration and its [scaling].")] = False,
    ray_address: Annotated[str, Option(help=RAY_HELP)] = "",
    timeout_s: Annotated[float, Option(help="Seconds until the sizes must be reached.")] = 600.0,
) -> None:
    """Change how many workers each pool has, within the budget they were started with.

    \b
    pdserve scale --prefill 1 --decode 3
    pdserve scale --auto

    A pool that shrinks drains its workers first: requests finish, and the other pool grows into what they leave.
    """
    if auto == (prefill is not None or decode is not None):
        raise ConfigError("says no sizes, or two things", field="scale", remedy="give --prefill, --decode, or --auto")
    _attach(ray_address)
    from pdserve.cluster.resize import ask_auto, ask_sizes

    if auto:
        ask_auto()
        err.print("sizes follow the configuration")
        return
    with progress("waiting for the pools"):
        sizes = ask_sizes(prefill, decode, timeout_s)
    err.print(f"{sizes['prefill']} prefill and {sizes['decode']} decode workers")


def update(
    config: Annotated[
        Path | None, Option(help="TOML file of the new version; else as `pdserve up` without one.")
    ] = None,
    model: Annotated[str, Option(help="Checkpoint of the new version.")] = "",
    prefill: Annotated[int | None, Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, Option(help="Decode workers.")] = None,
    gateway: Annotated[str, Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    ray_address: Annotated[str, Option(help=RAY_HELP)] = "",
) -> None:
    """Replace the workers by those of a new version, a few at a time, while the old ones serve.

    \b
    pdserve update --model ./my-checkpoint-v2
    pdserve update --config pdserve.toml

    A request stays with the version it began with. Room for one more worker of each pool is needed.
    """
    settings = load_config(config, overrides(model, prefill, decode, None, None))
    running = _attach(ray_address or settings.pools.ray_address)
    gateway = gateway or (running.gateway if running is not None else "")
    if not gateway:
        raise ConfigError("no gateway is known", field="gateway", remedy="give --gateway HOST:PORT")
    from pdserve.cli.rolling import Rolling

    Rolling(with_registry(settings, gateway), gateway, operator_key(config), lambda text: err.print(text)).run()
    err.print("updated")


def _attach(address: str) -> Running | None:
    """Connects to Ray. Returns the `pdserve up` of this machine, if it is what was meant."""
    running = read_running() if not address else None
    attach(address or (running.ray if running is not None else "") or "auto")
    return running
