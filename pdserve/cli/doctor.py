"""`pdserve doctor`: what is wrong with a deployment, and what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.ask import ApiKey, Plaintext, TlsFolder, flags_named, gateway_address, rpc_settings
from pdserve.cli.console import fail, out, progress
from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from pdserve.doctor.findings import Finding
    from pdserve.doctor.observed import Song
    from pdserve.doctor.run import Report

NOT_EXAMINED = 2
_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(
    gateway: Annotated[str, typer.Argument(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    canary: Annotated[bool, typer.Option(help="Generate a few tokens through the pairs that fit.")] = True,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs to try at most; each worker comes first.")] = 16,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=60.0, help="Seconds for each answer, and for each canary.")
    ] = 10.0,
) -> None:
    """Examine a deployment through its router: what is wrong, and what to do.

    Looks at versions, contracts, workers, every transfer path as its prefill worker finds it, certificates, clocks,
    the registry, load, page accounts, kernels and disks; then a canary generates a few tokens through each pair.
    With TLS it needs an operator's (or a router's) certificate; where tenants have keys, a key of router.operators.

    Exit code 0: all is well; 1: warnings; 2: failures, or the router could not be asked.
    """
    from pdserve.doctor.findings import exit_code
    from pdserve.doctor.run import examine

    try:
        with flags_named(), progress("examining"):
            address = gateway_address(gateway)
            rpc = rpc_settings(tls, plaintext)
            report = examine(address, rpc, api_key, timeout_s=timeout_s, pairs=pairs if canary else 0)
    except PdserveError as error:
        fail(error)
        raise typer.Exit(NOT_EXAMINED) from None
    if as_json:
        print(json.dumps(_json(report)))
    else:
        _show(report)
    raise typer.Exit(exit_code(report.findings))


def _show(report: Report) -> None:
    """A terminal wraps within its columns; elsewhere no line is broken."""
    console = Console(highlight=False) if out.is_terminal else out
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for finding in folded(report.findings):
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, _text(finding))
    console.print(table)
    counts = Counter(finding.level for finding in report.findings)
    told = ", ".join(f"{counts[level]} {level}" for level in _STYLES)
    console.print(Text(f"{report.gateway}, pdserve {report.version}: {told}"))


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in nothing but their subject become one of several subjects, in the place of the first."""
    subjects: dict[Finding, list[str]] = {}
    for finding in findings:
        subjects.setdefault(replace(finding, subject=""), []).append(finding.subject)
    return [replace(finding, subject=", ".join(each)) for finding, each in subjects.items()]


def _text(finding: Finding) -> Text:
    """The sentence, with its subject unless it begins with it; below it what to do."""
    named = not finding.subject or finding.message.startswith(finding.subject)
    text = Text(finding.message if named else f"{finding.subject}: {finding.message}")
    if finding.remedy:
        text.append(f"\n  -> {finding.remedy}", style="italic")
    return text


def _json(report: Report) -> dict[str, Any]:
    """Names stay as they are; new ones may come."""
    from pdserve.doctor.findings import LEVELS, exit_code

    counts = Counter(finding.level for finding in report.findings)
    return {
        "gateway": report.gateway,
        "version": report.version,
        "exit_code": exit_code(report.findings),
        "counts": {level: counts[level] for level in LEVELS},
        "findings": [asdict(finding) for finding in report.findings],
        "canaries": [_song(song) for song in report.songs],
    }


def _song(song: Song) -> dict[str, Any]:
    return {
        "prefill_worker": song.prefill_worker,
        "decode_worker": song.decode_worker,
        "token_ids": list(song.ids),
        "first_token_ms": song.attempt.first_token_ms,
        "transfer_ms": song.attempt.transfer_ms,
        "bytes_sent": song.attempt.bytes_sent,
        "error": None if song.error is None else {"reason": song.error.reason, "message": str(song.error)},
    }
