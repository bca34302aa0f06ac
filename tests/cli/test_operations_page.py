"""docs/operations.md: its commands are those of the program, its links lead somewhere, every alert has its section."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import typer
import yaml
from typer.exceptions import TyperException
from typer.testing import CliRunner

from pdserve.cli.main import app
from tests.router.support import House, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operations.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOOKS = ("doctor", "status", "generate", "health", "adapters list", "top")
"""Commands that change nothing."""


def lines() -> list[str]:
    """Every command line of the page, and those within its sentences."""
    text = PAGE.read_text()
    found = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    prose = BLOCK.sub("", text)
    return found + [command for command in re.findall(r"`([^`\n]+)`", prose) if command.startswith("pdserve ")]


def commands() -> list[list[str]]:
    """Arguments of every `pdserve`, without comments, pipes and files."""
    found = [shlex.split(line.partition("|")[0].partition(" > ")[0], comments=True) for line in lines()]
    return [words[1:] for words in found if words and words[0] == "pdserve"]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


async def test_every_command_of_the_page_is_one_of_the_program() -> None:
    assert len(commands()) > 30
    for words in {tuple(words): words for words in commands()}.values():
        parse(words)
    for wrong in (["doctor", "--unknown"], ["scale", "--prefill", "many"], ["adapters", "paint"], ["paint"]):
        with pytest.raises((AssertionError, TyperException)):
            parse(wrong)


async def test_every_link_of_the_page_and_every_alert_leads_to_a_section() -> None:
    here = anchors(PAGE)
    links = re.findall(r"\]\(([^)]*)\)", PAGE.read_text())
    rules = yaml.safe_load((ROOT / "infra" / "observability" / "alerts.yaml").read_text())
    alerts = [rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 15 and all(alert.startswith("docs/operations.md#") for alert in alerts)
    for link in (*links, *(alert.removeprefix("docs/operations.md") for alert in alerts)):
        file, _, anchor = link.partition("#")
        target = PAGE.parent / file if file else PAGE
        assert target.exists(), link
        assert not anchor or anchor in (anchors(target) if file else here), link


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house() as it:
        yield it


async def test_commands_that_only_look_run_as_they_stand(made: House) -> None:
    places = {"GATEWAY": made.router.address, "WORKER": made.decodes[0].address}
    ran = {tuple(places.get(word, word) for word in words) for words in commands() if runs(words)}
    for words in sorted(ran):
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words))
        assert done.exit_code == 0, (words, done.output)
    assert {words[0] for words in ran} >= {name.split()[0] for name in LOOKS}


def runs(words: list[str]) -> bool:
    """It changes nothing, and ends by itself."""
    looks = any(words[: len(name.split())] == name.split() for name in LOOKS)
    return looks and len(words) > 1 and (words[0] != "top" or "--once" in words)


def parse(words: list[str]) -> None:
    """Raises TyperException for an unknown command, option or value. Runs nothing."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    assert not isinstance(command, typer.core.TyperGroup), words
    command.make_context(command.name, list(words)).close()
