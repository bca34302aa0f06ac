"""`pdserve adapters`: LoRA adapters of a deployment while it serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from pdserve.cli.ask import ApiKey, Plaintext, TlsFolder, flags_named, gateway_address, rpc_settings
from pdserve.cli.console import err, out, progress
from pdserve.client import Client, WorkerAdapters
from pdserve.client.adapters import LOAD_TIMEOUT_S, UNLOAD_WAIT_S

app = typer.Typer(help="Load, unload and list LoRA adapters while the workers serve.", no_args_is_help=True)

Gateway = Annotated[
    str, typer.Option(help="host:port of a gateway, or of one worker; empty: the running `pdserve up`.")
]
Model = Annotated[str, typer.Option(help="Served name of the base model; empty: the only one.")]
Name = Annotated[str, typer.Argument(help="What requests name the adapter by.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def load(
    name: Name,
    path: Annotated[str, typer.Argument(help="Its directory on every worker, below their adapter_root.")],
    model: Model = "",
    gateway: Gateway = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the workers get.")] = LOAD_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Serve an adapter under a name; another version that the name had is replaced without a gap."""
    with (
        flags_named(),
        Client(gateway_address(gateway), rpc_settings(tls, plaintext), api_key=api_key) as client,
        progress(f"loading {name}"),
    ):
        workers = client.load_adapter(name, path, model=model, timeout_s=timeout_s)
    _show(workers, as_json)


@app.command()
def unload(
    name: Name,
    model: Model = "",
    gateway: Gateway = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    wait_s: Annotated[float, typer.Option(help="Seconds that requests which use it get to end.")] = UNLOAD_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Serve a name no longer. Where requests still use it after the wait, it stays, and this fails."""
    with (
        flags_named(),
        Client(gateway_address(gateway), rpc_settings(tls, plaintext), api_key=api_key) as client,
        progress(f"unloading {name}"),
    ):
        workers = client.unload_adapter(name, model=model, wait_s=wait_s)
    _show(workers, as_json)


@app.command("list")
def list_adapters(
    model: Model = "",
    gateway: Gateway = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Show which versions each worker serves, and how many requests use them."""
    with flags_named(), Client(gateway_address(gateway), rpc_settings(tls, plaintext), api_key=api_key) as client:
        workers = client.adapters(model)
    _show(workers, as_json)


def _show(workers: Sequence[WorkerAdapters], as_json: bool) -> None:
    """Ends with status 1 if a worker refused."""
    if as_json:
        print(json.dumps({"workers": [_plain(worker) for worker in workers]}))
    else:
        out.print(_table(workers))
    failures = [worker for worker in workers if worker.error is not None]
    for worker in failures:
        err.print(f"error: {worker.worker_id}: {worker.error}", style="red", markup=False)
    if failures:
        raise typer.Exit(1)


def _table(workers: Sequence[WorkerAdapters]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "pool", "model", "adapter", "version", "rank", "MB", "requests"):
        table.add_column(column, justify="right" if column in ("rank", "MB", "requests") else "left")
    for worker in workers:
        for a in worker.adapters:
            name, size = a.name or "(replaced)", f"{a.size_bytes / 1e6:.1f}"
            about = (worker.worker_id, worker.role, worker.model)
            table.add_row(*about, name, a.digest.hex()[:16], str(a.rank), size, str(a.users))
        if not worker.adapters:
            table.add_row(worker.worker_id, worker.role, worker.model, "none" if worker.error is None else "?")
    return table


def _plain(worker: WorkerAdapters) -> dict[str, Any]:
    error = worker.error
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "model": worker.model,
        "adapters": [asdict(adapter) | {"digest": adapter.digest.hex()} for adapter in worker.adapters],
        "error": None if error is None else {"reason": error.reason, "message": str(error)},
    }
