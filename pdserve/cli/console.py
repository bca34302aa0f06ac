"""What the commands print: answers on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import ConfigError, PdserveError
from pdserve.rpc.events import AttemptRecord, GroupPair, HandoffRecord, PositionLogprobs

err = Console(stderr=True, highlight=False, soft_wrap=True)
# As wide as any table: what is too long for a terminal is wrapped there, and never cut in a pipe.
out = Console(highlight=False, soft_wrap=True, width=10_000)


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


def check_writable(path: Path, field: str) -> None:
    """Before the work whose result goes there. Raises ConfigError; writes nothing."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", field=field, remedy="name a file")
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot write {path}: there is no directory {path.parent}", field=field, remedy="make it, or name another"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied", field=field, remedy="name another file")


def write_file(path: Path, text: str, field: str) -> None:
    """Raises ConfigError when the disk refuses."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field=field, remedy="name another file") from error


def show_logprobs(positions: Iterable[PositionLogprobs]) -> None:
    """One line per output token on standard error: its id, its log probability, and the best ones."""
    for position in positions:
        best = "  ".join(f"{top.id}:{top.logprob:.3f}" for top in position.top)
        err.print(Text(f"{position.chosen.id:>8} {position.chosen.logprob:8.3f}   {best}"))


def show_record(record: HandoffRecord) -> None:
    """The handoff record as a table on standard error."""
    table = Table(title="handoff record", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in record_rows(record):
        table.add_row(name, Text(value))
    err.print(table)


def record_rows(record: HandoffRecord) -> list[tuple[str, str]]:
    rows = [
        ("prefill worker", record.prefill_worker or "-"),
        ("decode worker", record.decode_worker or "-"),
        ("prompt", f"{record.prompt_tokens} tokens, {record.computed_tokens} computed, {record.sent_tokens} sent"),
        ("sent", f"{record.bytes_sent:,} bytes in {record.frames_sent} frames"),
        ("queued", f"{record.queued_ms:.1f} ms"),
        ("prefill", f"{record.prefill_ms:.1f} ms"),
        ("push", f"{record.push_ms:.1f} ms from grant to acknowledgement, prefill included"),
        ("transfer", f"{record.transfer_ms:.1f} ms after the last layer (the rest overlapped with prefill)"),
        *(("placed", placement_text(attempt)) for attempt in record.history[-1:]),
        ("first token", f"{record.first_token_ms:.1f} ms after the request arrived"),
        ("decode", f"{record.decode_tokens_per_s:.1f} tokens/s"),
    ]
    if record.choices > 1:
        pages = f"{record.shared_pages} pages read together, {record.copied_pages} copied"
        times = f"{record.choices}, from {record.prefills} prefill and {record.transfers} handoff; {pages}"
        rows.append(("choices", times))
    rows.append(("attempts", str(record.attempts)))
    if record.attempts > 1:
        rows += [(f"attempt {number}", attempt_text(attempt)) for number, attempt in enumerate(record.history, 1)]
    rows += [("pairs that fit", group_text(group)) for group in record.candidates]
    rows += [("pairs refused", group_text(group)) for group in record.rejected]
    rows += [("converted", str(difference)) for difference in record.conversions]
    rows += [("note", note) for note in record.notes]
    return rows


def attempt_text(attempt: AttemptRecord) -> str:
    """One attempt in one line."""
    tokens = f"tokens {attempt.first_index} to {attempt.first_index + attempt.output_tokens - 1}, then "
    end = f"{attempt.outcome} at {attempt.failed_worker}" if attempt.failed_worker else attempt.outcome
    return f"{attempt.prefill_worker} -> {attempt.decode_worker}: {tokens if attempt.output_tokens else ''}{end}"


def placement_text(attempt: AttemptRecord) -> str:
    """Who computed the prompt, why, and what had been predicted."""
    known = {
        "handoff": attempt.predicted_handoff_ms,
        "at decode": attempt.predicted_decode_ms,
        "split": attempt.predicted_split_ms,
    }
    told = ", ".join(f"{name} {ms:.0f} ms" for name, ms in known.items() if ms)
    predicted = f"; predicted {told}, took {attempt.first_token_ms:.0f} ms" if told else ""
    where = (
        f"{attempt.placement} after {attempt.handoff_tokens} tokens" if attempt.handoff_tokens else attempt.placement
    )
    return f"{where} ({attempt.placement_reason}){predicted}"


def group_text(group: GroupPair) -> str:
    """Alike prefill workers -> alike decode workers: every difference. Or decode workers that compute the prompt."""
    sides = _ids(group.prefill_workers, group.prefill_count), _ids(group.decode_workers, group.decode_count)
    differences = "; ".join(str(difference) for difference in group.differences)
    here = group.prefill_count and sides[0] == sides[1]
    ways = f"{sides[1]}, without a handoff" if here else " -> ".join(sides)
    return ways + (f": {differences}" if differences else "")


def _ids(some: tuple[str, ...], count: int) -> str:
    more = count - len(some)
    return ", ".join(some) + (f" and {more} more" if more > 0 else "")
