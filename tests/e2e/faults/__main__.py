"""The whole matrix, and its figures: `python -m tests.e2e.faults [--json FILE] [NAME ...]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pdserve.errors import PdserveError
from tests.e2e.faults.cell import Result, run
from tests.e2e.faults.house import Leaked, open_house
from tests.e2e.faults.table import CELLS, Cell, Fault, Outcome


async def run_all(cells: Sequence[Cell], directory: Path) -> tuple[list[Result], dict[str, Exception]]:
    """Results of the cells that passed, and by name what was wrong in the others."""
    passed: list[Result] = []
    failed: dict[str, Exception] = {}
    for slow, some in groupby(cells, lambda cell: cell.fault is Fault.SLOW):
        async with open_house(directory, relays=slow) as house:
            for cell in some:
                try:
                    passed.append(await run(house, cell))
                    say(f"{cell.name:32} {_brief(passed[-1])}")
                except (AssertionError, TimeoutError, PdserveError) as error:
                    failed[cell.name] = error
                    say(f"{cell.name:32} FAILED: {type(error).__name__}: {error}\n{house.logs()}")
                    await house.repair()
    return passed, failed


def figures(passed: Sequence[Result], failed: dict[str, Exception], took_s: float) -> dict[str, object]:
    errors = [result.ended_s for result in passed if result.cell.expected is not Outcome.COMPLETE]
    answers = [result.ended_s for result in passed if result.cell.expected is Outcome.COMPLETE]
    return {
        "cells_run": len(passed) + len(failed),
        "cells_passed": len(passed),
        "pages_leaked": sum(error.pages for error in failed.values() if isinstance(error, Leaked)),
        "longest_s_to_a_typed_error": round(max(errors, default=0.0), 3),
        "longest_s_to_a_complete_answer": round(max(answers, default=0.0), 3),
        "longest_s_to_pages_free": round(max((result.freed_s for result in passed), default=0.0), 3),
        "seconds": round(took_s, 1),
        "failed": {name: f"{type(error).__name__}: {error}" for name, error in failed.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m tests.e2e.faults", description=__doc__)
    parse.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parse.add_argument("names", nargs="*", metavar="NAME", help="cells whose names contain one of these (default: all)")
    options = parse.parse_args(arguments)
    cells = [cell for cell in CELLS if not options.names or any(name in cell.name for name in options.names)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdserve-faults-") as directory:
        passed, failed = asyncio.run(run_all(cells, Path(directory)))
    found = figures(passed, failed, time.monotonic() - began)
    say(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if failed else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _brief(result: Result) -> str:
    end = result.error or "complete"
    return f"{end:20} {result.ended_s:5.2f} s, free {result.freed_s:5.2f} s, back {result.healed_s:5.2f} s"


if __name__ == "__main__":
    sys.exit(main())
