"""Every page of the project: the files, modules, commands, tests and sections that it names are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.exceptions import TyperException

from tests.cli.test_operations_page import anchors, parse

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = "py|md|proto|cpp|toml|ya?ml|json|sh|mjs|js|html|txt"
FILE = re.compile(rf"[\w.-]+(?:/[\w.-]+)+\.(?:{KINDS})\b|\b[\w-]+\.(?:py|cpp)\b")
FOLDERS = ("", "pdserve", "pdserve/engine", "pdserve/engine/native", "docs", "examples", "benchmarks", "infra")
CODE = ("pdserve", "cache_transfer", "prefill_worker", "decode_worker", "router", "benchmarks", "examples", "tests")
KNOWN = {path.name for folder in (*CODE, "infra") for path in (ROOT / folder).rglob("*.py")}
parametrize = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def prose(page: Path) -> list[str]:
    """What stands between backticks in the sentences."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def shell(page: Path) -> list[str]:
    """Command lines of the page's blocks, each with its continuations, and those in its sentences."""
    blocks = [text for kind, text in FENCE.findall(page.read_text()) if kind == "sh"]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + [text for text in prose(page) if text.startswith(("pdserve ", "python -m ", "make "))]


@parametrize
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in {name for text in prose(page) for name in FILE.findall(text) if "*" not in text and "{" not in text}:
        places = (page.parent, *(ROOT / folder for folder in FOLDERS))
        assert name in KNOWN or any((place / name).exists() for place in places), name


@parametrize
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors(target), link


@parametrize
def test_commands_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell(page):
        for module in re.findall(r"python -m ([a-z_.]+)(?= |$)", line):
            path = ROOT / module.replace(".", "/")
            if module.partition(".")[0] in CODE:
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line
        if made := re.match(r"make ([a-z -]+)", line):
            assert set(made[1].split()) <= targets, line
        if line.startswith("pdserve "):
            check_command(shlex.split(re.split(r" [|>&]|\.\.\.", line)[0], comments=True)[1:])


def check_command(words: list[str]) -> None:
    """It is one of the program's, with its options; what it needs besides may be left out in a sentence."""
    try:
        parse(words)
    except TyperException as error:
        assert type(error).__name__ == "MissingParameter", (words, error)


@parametrize
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
