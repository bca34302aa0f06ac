"""`pdserve verify`: does one configuration compute what another does, and if not, where does it begin?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from pdserve.cli.ask import Plaintext, TlsFolder, rpc_settings
from pdserve.cli.console import check_writable, fail, out, progress, write_file
from pdserve.config import load_config
from pdserve.errors import ConfigError, PdserveError
from pdserve.rpc.settings import RpcSettings
from pdserve.verify.sides import Side, parse_side

if TYPE_CHECKING:
    from pdserve.verify.compare import Comparison, Finding

Option = typer.Option

DEFAULT = ("smollm2", "chunked", "batched", "reused", "handoff")
EQUAL, DIVERGED, UNUSABLE = 0, 1, 2


def verify(
    sides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SIDE", help="The baseline, and what to compare with it."),
    ] = None,
    against: Annotated[list[str] | None, Option(help="One more side to compare with the baseline. Repeatable.")] = None,
    prompt: Annotated[list[str] | None, Option(help="Text to run. Repeatable; default: four prompts.")] = None,
    token_ids: Annotated[list[str] | None, Option(help="Prompt as token ids, such as '1,2,3'. Repeatable.")] = None,
    tokens: Annotated[int, Option(help="Greedy tokens to generate after each prompt.")] = 4,
    tolerance: Annotated[
        float | None, Option(help="Relative error allowed; default: that of the coarser dtype.")
    ] = None,
    every: Annotated[bool, Option("--all", help="Show every tensor of every layer, not only the worst few.")] = False,
    as_json: Annotated[
        Path | None, Option("--json", help="Write the whole report to this file; '-': print it.")
    ] = None,
    config: Annotated[
        Path | None, Option(help="TOML file; its model, precision and pages hold for the baseline.")
    ] = None,
    tls: TlsFolder = None,
    plaintext: Plaintext = False,
) -> None:
    """Run the same prompts in two ways and compare them layer by layer.

    \b
    pdserve verify                                    the packaged model: chunks, batches, prefix reuse, handoff
    pdserve verify ./model --against transformers     ours against the peer library
    pdserve verify ./model.gguf ./model-directory     two checkpoints of one model
    pdserve verify ./model bf16 kv:bf16,page:32       precisions and layouts
    pdserve verify worker:127.0.0.1:7001 worker:127.0.0.1:7002      with TLS: --tls FOLDER of an operator

    \b
    A side is words joined by commas. What it does not say it takes over from the baseline.
      what runs     PATH, smollm2, transformers, worker:HOST:PORT (a prefill worker with allow_trace = true)
      precision     fp32, bf16, fp16, float64, kv:TYPE, int8, fast, plain, native, deterministic
      cache         page:N, hnd, nhd, device:NAME
      steps         whole, chunked, chunked:N
      company       alone, batched, batched:N, reused, reused:N, handoff

    \b
    Compared exactly: positions, cached tokens, visible keys. Within a tolerance: each layer's input (x),
    cached k and v, attention, output (y), the raw logits and the ranks of the best ids.
    Exit status: 0 equal within tolerance, 1 not equal (the first place is named), 2 could not compare.
    """
    try:
        equal = _verify(
            sides or [], against or [], prompt or [], token_ids or [], tokens, tolerance, every, as_json, config,
            rpc_settings(tls, plaintext) if tls or plaintext else None,
        )  # fmt: skip
    except PdserveError as error:
        fail(error)
        raise typer.Exit(UNUSABLE) from None
    raise typer.Exit(EQUAL if equal else DIVERGED)


def _verify(
    sides: list[str],
    against: list[str],
    texts: list[str],
    token_ids: list[str],
    tokens: int,
    tolerance: float | None,
    every: bool,
    as_json: Path | None,
    config: Path | None,
    rpc: RpcSettings | None,
) -> bool:
    """`rpc`: how workers are reached; None: as a router of this configuration."""
    if as_json is not None and str(as_json) != "-":
        check_writable(as_json, "--json")
    settings = load_config(config)
    engine = settings.decode.engine
    base = Side("baseline", model=settings.model.path, engine=engine)
    words = [*sides, *against]
    if not words:
        words = [settings.model.path, *DEFAULT[1:]]
    first = parse_side(words[0], base)
    others = [parse_side(text, first) for text in (words[1:] or DEFAULT[1:])]
    ids = [_ids(text) for text in token_ids]
    # torch takes seconds to import; --help and wrong words do not need it.
    import torch

    from pdserve.verify.compare import WORST
    from pdserve.verify.report import to_json
    from pdserve.verify.run import Request, verify

    torch.set_num_threads(engine.threads)
    request = Request(
        texts=texts,
        ids=ids,
        tokens=tokens,
        tolerance=tolerance,
        rpc=rpc or settings.router.rpc,
    )
    comparisons, prompts = verify([first, *others], request, progress)
    if as_json is None or str(as_json) != "-":
        lengths = ", ".join(str(len(ids)) for ids in prompts)
        out.print(f"prompts of {lengths} tokens, then {tokens} greedy tokens each")
        out.print(f"errors are relative to each row; the worst may have {WORST:g} times the tolerance\n")
        show(comparisons, every)
    if as_json is not None:
        text = json.dumps(to_json(comparisons, prompts, tokens), indent=1)
        if str(as_json) == "-":
            print(text)
        else:
            write_file(as_json, text + "\n", "--json")
    return all(comparison.equal for comparison in comparisons)


def show(comparisons: Iterable[Comparison], every: bool) -> None:
    """For each comparison the verdict and its worst rows, or every row; then one line about all."""
    from pdserve.verify.diagnose import diagnose
    from pdserve.verify.report import worst

    comparisons = list(comparisons)
    for comparison in comparisons:
        out.print(_verdict(comparison))
        if not comparison.equal:
            for hint in diagnose(comparison):
                out.print(Text(f"  {hint}"))
        findings = comparison.findings if every else worst(comparison)
        if findings:
            out.print(_table(comparison, findings))
        out.print()
    out.print(_summary(comparisons))


def _verdict(comparison: Comparison) -> Text:
    from pdserve.verify.report import place

    left, right = comparison.left.side.text, comparison.right.side.text
    if comparison.equal:
        bits = all(finding.bits_equal for finding in comparison.findings)
        how = "bit for bit" if bits else f"within {comparison.tolerance:.0e}"
        return Text(f"{right} equals {left} {how}", style="green")
    first = comparison.first
    if first is None:
        return Text(f"{right} against {left}: a rule is broken", style="red")
    text = f"{right} differs from {left}; it begins at: {place(first, comparison)}"
    return Text(f"{text}: {first.detail}" if first.detail else text, style="red")


def _summary(comparisons: Sequence[Comparison]) -> Text:
    count, wrong = len(comparisons), sum(not comparison.equal for comparison in comparisons)
    what = f"{count} comparison{'s' if count > 1 else ''}"
    if wrong:
        return Text(f"{what}, {wrong} not within tolerance", style="red")
    return Text(f"{what}, {'all ' if count > 1 else ''}within tolerance", style="green")


def _table(comparison: Comparison, findings: Sequence[Finding]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
    )
    columns = ("layer", "prompt", "tensor", "token", "max abs", "worst row", "mean", "tolerance", "ok", "")
    for column in columns:
        table.add_column(column, justify="left" if column in ("tensor", "ok", "") else "right", no_wrap=bool(column))
    layers = comparison.left.shape.layers
    for f in findings:
        exact = f.tolerance == 0.0
        table.add_row(
            "in" if f.layer < 0 else "out" if f.layer == layers else str(f.layer),
            str(f.prompt + 1),
            f.tensor,
            str(f.token) if f.token >= 0 else "",
            "" if exact else f"{f.max_abs:.1e}",
            "" if exact else _number(f.error),
            "" if exact else _number(f.mean),
            "exact" if exact else f"{f.tolerance:.0e}",
            Text("yes" if f.ok else "NO", style="green" if f.ok else "red"),
            Text(f.detail),
        )
    return table


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "-"


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a list of integers", field="--token-ids", remedy="write them as 1,2,3"
        ) from error
