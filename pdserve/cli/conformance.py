"""`pdserve conformance`: does a decode worker, ours or another, do what docs/protocol.md says?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from pdserve.cli.ask import Plaintext, TlsFolder, flags_named, rpc_settings
from pdserve.cli.console import check_writable, out, write_file
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.conformance.cases import Result

_STYLES = {"pass": "green", "fail": "red", "skip": "yellow"}


def conformance(
    endpoint: Annotated[str, typer.Argument(help="host:port of the worker's Decode service. It must be idle.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Cases or groups by name; * and ? match. Repeatable.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds that a case may wait for the worker's own time limits.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="Deadline of every call, in seconds.")] = 30.0,
    settle: Annotated[float, typer.Option(help="Seconds until pages must be back after a case.")] = 5.0,
    tls: TlsFolder = None,
    worker_tls: Annotated[
        Path | None, typer.Option(help="The same of a worker's certificate, which pushes need; default: that of --tls.")
    ] = None,
    plaintext: Plaintext = False,
) -> None:
    """Drive a decode worker with good and hostile handoffs; pass or fail by case.

    It plays a router and a prefill worker, and with TLS needs the certificates of both: --tls FOLDER/router
    --worker-tls FOLDER/worker. Leaves nothing behind but cached prefixes of tenants that nobody else has.
    Exit code 1: a case failed; 2: nothing could be tried.
    """
    # numpy and the transfer take a while to import; the other commands do not need them.
    from pdserve.conformance.bench import Limits
    from pdserve.conformance.runner import run, select

    cases = select(only or ())
    if not cases:
        raise ConfigError(f"no case matches {', '.join(only or ())}", field="--only", remedy="name a case or a group")
    if not (0 < timeout < 86400 and 0 < settle < 86400 and 0 <= wait < timeout):
        raise ConfigError(
            f"timeout {timeout:g}, settle {settle:g}, wait {wait:g}",
            field="--timeout",
            remedy="use more than 0 seconds, and a timeout above --wait",
        )
    if json_file is not None:
        check_writable(json_file, "--json")
    began = time.monotonic()
    limits = Limits(timeout_s=timeout, settle_s=settle, wait_s=wait)
    rpc, push_rpc = rpc_settings(tls, plaintext), rpc_settings(worker_tls or tls, plaintext)
    with flags_named():
        results = run(endpoint, limits, cases, rpc, push_rpc, told=_show)
    summary = _summary(endpoint, results, time.monotonic() - began)
    if json_file is not None:
        report = {**summary, "cases": [asdict(result) for result in results]}
        write_file(json_file, json.dumps(report, indent=1) + "\n", "--json")
    out.print(
        f"{summary['passed']} passed, {summary['failed']} failed, {summary['skipped']} skipped; "
        f"{summary['hostile_inputs']} hostile inputs tried in {summary['seconds']:.1f} s"
    )
    if summary["failed"]:
        raise typer.Exit(1)


def _show(result: Result) -> None:
    """One row of the table, as soon as it is known."""
    row = Text(f"{result.outcome.value:<5}", style=_STYLES[result.outcome.value])
    row.append(f" {result.group:<10} {result.name}", style="default")
    if result.detail:
        row.append(f": {result.detail}", style="default")
    out.print(row)


def _summary(endpoint: str, results: list[Result], seconds: float) -> dict[str, Any]:
    outcomes = [result.outcome.value for result in results]
    return {
        "endpoint": endpoint,
        "passed": outcomes.count("pass"),
        "failed": outcomes.count("fail"),
        "skipped": outcomes.count("skip"),
        "hostile_inputs": sum(result.hostile_inputs for result in results),
        "seconds": seconds,
    }
