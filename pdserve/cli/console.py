"""What the commands print: answers on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import PdserveError
from pdserve.rpc.events import AttemptRecord, HandoffRecord, PositionLogprobs

err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: PdserveError) -> None:
    """One line with what is wrong and the remedy; then one per difference of two contracts."""
    err.print(Text(f"error: {error}", style="red"))
    for difference in error.differences:
        err.print(Text(f"  {difference}"))


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says what is being waited for: a spinner on a terminal, plain lines elsewhere."""
    if err.is_terminal:
        with err.status(what):
            yield
        return
    err.print(f"{what} ...")
    yield


def write(text: str) -> None:
    """A piece of the answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_logprobs(positions: Iterable[PositionLogprobs]) -> None:
    """One line per output token on standard error: its id, its log probability, and the best ones."""
    for position in positions:
        best = "  ".join(f"{top.id}:{top.logprob:.3f}" for top in position.top)
        err.print(Text(f"{position.chosen.id:>8} {position.chosen.logprob:8.3f}   {best}"))


def show_record(record: HandoffRecord) -> None:
    """The handoff record as a table on standard error."""
    table = Table(title="handoff record", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan")
    table.add_column()
    for name, value in record_rows(record):
        table.add_row(name, value)
    err.print(table)


def record_rows(record: HandoffRecord) -> list[tuple[str, str]]:
    rows = [
        ("prefill worker", record.prefill_worker or "-"),
        ("decode worker", record.decode_worker or "-"),
        ("prompt", f"{record.prompt_tokens} tokens, {record.computed_tokens} computed, {record.sent_tokens} sent"),
        ("sent", f"{record.bytes_sent:,} bytes in {record.frames_sent} frames"),
        ("queued", f"{record.queued_ms:.1f} ms"),
        ("prefill", f"{record.prefill_ms:.1f} ms"),
        ("push", f"{record.push_ms:.1f} ms from grant to acknowledgement, prefill's own time included"),
        ("transfer", f"{record.transfer_ms:.1f} ms after the last layer (the rest overlapped with prefill)"),
        ("first token", f"{record.first_token_ms:.1f} ms after the request arrived"),
        ("decode", f"{record.decode_tokens_per_s:.1f} tokens/s"),
    ]
    if record.attempts > 1:
        rows.append(("attempts", str(record.attempts)))
        rows += [(f"attempt {number}", attempt_text(attempt)) for number, attempt in enumerate(record.history, 1)]
    rows += [("converted", str(difference)) for difference in record.conversions]
    rows += [("note", note) for note in record.notes]
    return rows


def attempt_text(attempt: AttemptRecord) -> str:
    """One attempt in one line."""
    tokens = f"tokens {attempt.first_index} to {attempt.first_index + attempt.output_tokens - 1}, then "
    end = f"{attempt.outcome} at {attempt.failed_worker}" if attempt.failed_worker else attempt.outcome
    return f"{attempt.prefill_worker} -> {attempt.decode_worker}: {tokens if attempt.output_tokens else ''}{end}"
