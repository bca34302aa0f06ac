"""`pdserve top`: pools, load and the last requests of a router, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.ask import ApiKey, Plaintext, TlsFolder, flags_named, gateway_address, rpc_settings
from pdserve.cli.console import out
from pdserve.cli.status import NOT_OPERATOR, placement_text, reduced_workers
from pdserve.client import Client, RecentRequest, Status, Worker
from pdserve.errors import Unavailable
from router.recent import FAILED, REFUSED, RUNNING
from router.waterfall import LOST, ORDER, WAITING, Stage, stages

_MARKS = {**dict(zip(ORDER, "·▓█▒░", strict=True)), WAITING: "·", LOST: "x"}
_BAR = 32  # characters
_BAD = (FAILED, REFUSED)
_FEWEST, _FIXED = 5, 9  # requests shown in a low terminal; its lines for everything but workers and requests


def top(
    gateway: Annotated[str, typer.Option(help="host:port of a gateway; empty: the running `pdserve up`.")] = "",
    api_key: ApiKey = "",
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    requests: Annotated[int, typer.Option(min=0, max=200, help="Requests in a frame; as many as fit, if fewer.")] = 200,
) -> None:
    """Watch pools, load and the last requests. Ends with Ctrl-C."""
    screen = Console()
    live = screen.is_terminal and not once
    with flags_named(), Client(gateway_address(gateway), rpc_settings(tls, plaintext), api_key=api_key) as client:
        if live:
            _watch(client, screen, interval, requests)
            return
        while True:  # in a pipe: one frame after the other, as wide as it has to be
            out.print(frame(client.status(recent=requests)))
            if once:
                return
            time.sleep(interval)


def _watch(client: Client, screen: Console, interval: float, requests: int) -> None:
    """Goes on while the router is away, and says so."""
    seen: Status | None = None
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            lost = ""
            try:
                seen = client.status(recent=requests)
            except Unavailable as error:
                if seen is None:
                    raise
                lost = f"connection lost, what is shown is old: {error.message}"
            room = max(_FEWEST, screen.height - _FIXED - len(seen.workers))
            live.update(frame(seen, min(requests, room), lost), refresh=True)
            time.sleep(interval)


def frame(status: Status, requests: int = 200, lost: str = "") -> RenderableType:
    """One look, for a terminal or a pipe."""
    parts: list[RenderableType] = [Text(headline(status))]
    if problem := lost or status.registry_warning:
        parts.append(Text(problem, style="red"))
    if status.reduced:
        parts += [Text(NOT_OPERATOR, style="dim"), Text(), reduced_workers(status.workers), Text()]
    else:
        parts += [Text(placement_text(status.placement), style="dim"), Text(), _workers(status.workers), Text()]
    parts.append(_requests(status.recent[:requests]) if status.recent else Text("no request yet", style="dim"))
    return Group(*parts)


def headline(status: Status) -> str:
    loads = {role: [w.load for w in status.workers if w.role == role] for role in ("prefill", "decode")}
    prompts, output = (sum(load.tokens_per_s for load in loads[role]) for role in ("prefill", "decode"))
    refused = sum(not pair.fits for pair in status.pairs)
    more = f", refused: {refused} (pdserve status)" if refused else ""
    pairs = f"pairs that fit: {len(status.pairs) - refused}{more}"
    if status.reduced:
        return f"pdserve {status.version}   {pairs}"
    told = [
        f"pdserve {status.version}",
        f"{status.active_requests} in flight",
        f"prompts {prompts:.0f} tok/s",
        f"output {output:.0f} tok/s",
        pairs,
        f"registry {status.registry}",
    ]
    return "   ".join(told)


def _workers(workers: Sequence[Worker]) -> RenderableType:
    if not workers:
        return Text("no workers yet: `pdserve up` starts two pools and a router")
    table = _table(("worker", ""), ("pool", ""), ("state", ""), ("model", ""), ("device", ""), ("run", "right"))
    for name in ("wait", "pages", "cached", "tok/s"):
        table.add_column(name, justify="right", style="", no_wrap=True)
    for w in workers:
        load = w.load
        table.add_row(
            Text(w.worker_id),
            w.role,
            Text(w.state, style="red" if w.state == "stalled" else ""),
            Text(w.model),
            w.contract.device,
            str(load.running),
            str(load.waiting),
            f"{load.pages_held}/{load.pages_total}",
            str(load.pages_cached),
            f"{load.tokens_per_s:.0f}",
        )
    return table


def _requests(recent: Sequence[RecentRequest]) -> Table:
    legend = "  ".join(f"{_MARKS[name]} {name}" for name in (*ORDER, LOST))
    table = _table(("began", ""), ("outcome", ""), ("tenant", ""), ("model", ""), ("route", ""), ("tokens", "right"))
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    table.add_column(legend, no_wrap=True)
    scale = max(one.age_ms for one in recent)
    for one in recent:
        r = one.record
        here = bool(r.history) and r.history[-1].placement == "decode"
        route = f"{r.decode_worker} alone" if here else f"{r.prefill_worker} -> {r.decode_worker}"
        table.add_row(
            datetime.fromtimestamp(one.began_s).strftime("%H:%M:%S"),
            Text(RUNNING if one.state == RUNNING else r.outcome, style="red" if one.state in _BAD else ""),
            Text(one.tenant),
            Text(f"{one.model}:{one.adapter}" if one.adapter else one.model),
            Text(route if r.decode_worker else "-"),
            f"{r.prompt_tokens}+{r.output_tokens}",
            f"{r.first_token_ms:.0f} ms" if r.first_token_ms else "-",
            f"{one.age_ms:.0f} ms" if one.age_ms else "-",
            bar(stages(r, one.age_ms), scale),
        )
    return table


def bar(found: Sequence[Stage], scale_ms: float) -> str:
    """Stages as characters, `scale_ms` wide; one that is shorter than a character is left out."""
    cells = ""
    for stage in found:
        end = round(_BAR * (stage.start_ms + stage.ms) / scale_ms) if scale_ms else 0
        cells += _MARKS[stage.name] * (end - len(cells))
    return cells


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify else "left", no_wrap=True)
    return table
