"""`pdserve status`: who is in the pools, how busy they are, and which pairs fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from pdserve.cli.ask import ApiKey, Plaintext, TlsFolder, flags_named, gateway_address, rpc_settings
from pdserve.cli.console import err, out
from pdserve.client import Client, Pair, Placement, Worker
from pdserve.errors import FieldDifference
from router.compatibility import verdict

INFORMATIONAL = "informational"  # differences that change no handoff
NOT_OPERATOR = "addresses, contracts and load are shown to operators (router.operators, or an operator's certificate)"
_WORDS = {"fits": "yes", "refused": "NO"}


def status(
    gateway: Annotated[str, typer.Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show pools, contracts and load, and which prefill and decode workers fit."""
    with flags_named(), Client(gateway_address(gateway), rpc_settings(tls, plaintext), api_key=api_key) as client:
        found = client.status()
    if as_json:
        print(json.dumps(asdict(found), default=_plain))
        return
    if found.registry_warning:
        err.print(f"warning: {found.registry_warning}", style="yellow", markup=False)
    out.print(f"models {', '.join(sorted({w.model for w in found.workers})) or 'none'}")
    if names := sorted({f"{w.model}:{name}" for w in found.workers for name, _ in w.adapters if name}):
        out.print(f"adapters {', '.join(names)}", markup=False)
    out.print(reduced_workers(found.workers) if found.reduced else _workers(found.workers))
    if pages := [f"{w.worker_id} {w.metrics}" for w in found.workers if w.metrics]:
        out.print(f"metrics {', '.join(pages)}", markup=False)
    if found.pairs:
        out.print("pairs (row: prefill, column: decode)")
    out.print(matrix(found.pairs))
    for line in reasons(found.pairs):
        out.print(line, markup=False)
    if found.reduced:
        out.print(f"pdserve {found.version}; {NOT_OPERATOR}", markup=False)
        return
    out.print(placement_text(found.placement), markup=False)
    out.print(f"registry {found.registry}, {found.active_requests} active requests, pdserve {found.version}")


def placement_text(p: Placement) -> str:
    """Where prompts were computed, and how the times of their first tokens compare with the predicted ones."""
    over = f"{p.handed_over} handed over" + (f" ({p.split} in part)" if p.split else "")
    text = f"disaggregate {p.disaggregate or 'always'}: {over}, {p.computed_at_decode} at decode"
    if p.fallbacks or p.cheaper:
        text += f" ({p.fallbacks} for want of a prefill worker, {p.cheaper} because it was cheaper)"
    if not p.predictions:
        return text
    edges = [*(f"up to {bound:g}" for bound in p.bounds), "more"]
    counts = ", ".join(f"{edge}: {count}" for edge, count in zip(edges, p.ratios, strict=False) if count)
    return f"{text}; first token over prediction {counts}"


def _workers(workers: Iterable[Worker]) -> Table:
    """One row per worker; `contract` is the start of the digest over the fields that must be equal."""
    table = Table(title="workers", title_justify="left", box=None, pad_edge=False)
    kv = "kv dtype/page/axes"
    for column in ("worker", "pool", "state", "address", "contract", kv, "pages", "run", "wait", "tok/s"):
        table.add_column(column, justify="right" if column in ("run", "wait", "tok/s") else "left")
    for w in workers:
        c, load = w.contract, w.load
        table.add_row(
            w.worker_id,
            w.role,
            w.state,
            w.addresses[0] if w.addresses else "-",
            c.digest.hex()[:8],
            f"{c.kv_dtype}/{c.page_size}/{c.page_axis_order}",
            f"{load.pages_held}/{load.pages_total}",
            str(load.running),
            str(load.waiting),
            f"{load.tokens_per_s:.0f}",
        )
    return table


def reduced_workers(workers: Iterable[Worker]) -> Table:
    """What those are told of who are no operators."""
    table = Table("worker", "pool", "state", "model", title="workers", title_justify="left", box=None, pad_edge=False)
    for w in workers:
        table.add_row(w.worker_id, w.role, w.state, w.model)
    return table


def matrix(pairs: Sequence[Pair]) -> Table:
    """A row per prefill worker, a column per decode worker: yes, converts, lossy, or NO."""
    table = Table(box=None, pad_edge=False)
    decodes = sorted({pair.decode_worker for pair in pairs})
    table.add_column("")
    for decode in decodes:
        table.add_column(decode, overflow="fold")
    by_prefill: dict[str, dict[str, str]] = {}
    for pair in pairs:
        by_prefill.setdefault(pair.prefill_worker, {})[pair.decode_worker] = _verdict(pair)
    for prefill, row in sorted(by_prefill.items()):
        table.add_row(prefill, *(row.get(decode, "-") for decode in decodes))
    return table


def reasons(pairs: Iterable[Pair]) -> list[str]:
    """What lies behind the matrix, once for all pairs that share it: every refusal, conversion and loss."""
    alike: dict[tuple[bool, tuple[FieldDifference, ...]], dict[str, list[str]]] = {}
    for pair in pairs:
        told = tuple(d for d in pair.differences if d.kind != INFORMATIONAL)
        if told:
            alike.setdefault((pair.fits, told), {}).setdefault(pair.prefill_worker, []).append(pair.decode_worker)
    lines = []
    for (fits, told), rows in alike.items():
        lines += [f"{prefills} -> {decodes} {'fits' if fits else 'refused'}:" for decodes, prefills in _joined(rows)]
        lines += [f"    {difference} ({difference.kind.replace('_', ' ')})" for difference in told]
    return lines


def _verdict(pair: Pair) -> str:
    return _WORDS.get(word := verdict(pair.fits, pair.differences), word)


def _joined(rows: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(decode workers, prefill workers), where all of the one are paired with all of the other."""
    by_decodes: dict[str, list[str]] = {}
    for prefill, decodes in rows.items():
        by_decodes.setdefault(", ".join(sorted(decodes)), []).append(prefill)
    return [(decodes, ", ".join(sorted(prefills))) for decodes, prefills in by_decodes.items()]


def _plain(value: Any) -> str:
    """Digests as hexadecimal."""
    return value.hex() if isinstance(value, bytes) else str(value)
