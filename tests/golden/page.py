"""docs/protocol.md, taken apart."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()


def table(header: str) -> list[list[str]]:
    """Rows of the one table with this header."""
    (start,) = [match.end() for match in re.finditer(re.escape(f"| {header} |\n"), PAGE)]
    body = PAGE[start:].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def tables(header: str) -> list[list[str]]:
    """Rows of all tables with this header."""
    rows = []
    for part in PAGE.split(f"| {header} |\n")[1:]:
        for line in part.split("\n\n", 1)[0].splitlines()[1:]:
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    return rows


def code_of(cell: str) -> str:
    found = re.match(r"`([^`]+)`", cell)
    assert found, cell
    return found.group(1)
