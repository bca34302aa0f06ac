"""`pdserve status`: who is in the pools, how busy they are, and which pairs fit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pdserve.cli.ask import gateway_address
from pdserve.cli.console import err
from pdserve.client import Client, Pair, Worker

out = Console(highlight=False)


def status(
    gateway: Annotated[str, typer.Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show pools, contracts and load, and which prefill and decode workers fit."""
    with Client(gateway_address(gateway)) as client:
        found = client.status()
    if as_json:
        print(json.dumps(asdict(found), default=_plain))
        return
    if found.registry_warning:
        err.print(f"warning: {found.registry_warning}", style="yellow", markup=False)
    out.print(f"models {', '.join(sorted({w.model for w in found.workers})) or 'none'}")
    out.print(_workers(found.workers))
    out.print(_pairs(found.pairs))
    out.print(f"registry {found.registry}, {found.active_requests} active requests, pdserve {found.version}")


def _workers(workers: Iterable[Worker]) -> Table:
    """One row per worker; `contract` is the start of the digest over the fields that must be equal."""
    table = Table(title="workers", title_justify="left", box=None, pad_edge=False)
    for column in ("worker", "pool", "state", "contract", "kv", "pages", "run", "wait", "tok/s"):
        table.add_column(column, justify="right" if column in ("run", "wait", "tok/s") else "left")
    for w in workers:
        c, load = w.contract, w.load
        table.add_row(
            w.worker_id,
            w.role,
            w.state,
            c.digest.hex()[:8],
            f"{c.kv_dtype} {c.page_size} {c.page_axis_order}",
            f"{load.pages_held}/{load.pages_total}",
            str(load.running),
            str(load.waiting),
            f"{load.tokens_per_s:.0f}",
        )
    return table


def _pairs(pairs: Iterable[Pair]) -> Table:
    table = Table(title="prefill -> decode", title_justify="left", box=None, pad_edge=False)
    for column in ("prefill", "decode", "fits", "differences"):
        table.add_column(column)
    for pair in pairs:
        reasons = "\n".join(f"{d} ({d.kind})" for d in pair.differences if d.kind != "informational") or "-"
        table.add_row(pair.prefill_worker, pair.decode_worker, "yes" if pair.fits else "NO", reasons)
    return table


def _plain(value: Any) -> str:
    """Digests as hexadecimal."""
    return value.hex() if isinstance(value, bytes) else str(value)
