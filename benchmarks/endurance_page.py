"""Writes the figures of `benchmarks.soak` and `benchmarks.overload` into docs/endurance.md.

    python -m benchmarks.endurance_page NAME=FILE ...

replaces the table between the two marks of each NAME, such as soak or overload, by what is in that FILE.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.page import table
from benchmarks.peers.process import ROOT

PAGE = ROOT / "docs" / "endurance.md"


def filled(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- NAME -->` and `<!-- /NAME -->`. Raises ValueError without these marks."""
    mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if not mark.search(page):
        raise ValueError(f"the page has no marks for {name}")
    return mark.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main() -> None:
    page = PAGE.read_text()
    for argument in sys.argv[1:]:
        name, _, file = argument.partition("=")
        page = filled(page, name, table(json.loads(Path(file).read_text())))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
