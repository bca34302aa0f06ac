"""`pdserve generate` with several prompts, an echo, functions to call, and the options of a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from pdserve.cli.main import app
from pdserve.errors import InvalidRequest
from router.app import Router
from tests.router.scripted import ScriptedDecode, scripted
from tests.router.support import MODEL
from tests.router.tools import HERMES_TEMPLATE, TOOLS, with_template

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def peer() -> ScriptedDecode:
    stated = {"temperature": 0.5, "top_k": 7.0}
    return ScriptedDecode(replace(with_template(HERMES_TEMPLATE), sampling=stated))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(peer: ScriptedDecode) -> AsyncIterator[Router]:
    async with scripted({MODEL: peer}) as it:
        yield it


async def run(*command: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, command))


async def generate(router: Router, *arguments: str) -> Result:
    return await run("generate", *arguments, "--gateway", router.address)


async def test_several_prompts_come_under_their_numbers_with_an_echo(router: Router, peer: ScriptedDecode) -> None:
    peer.says = ["on the mat"]
    done = await generate(router, "the cat ", "the dog ", "--echo")
    assert done.exit_code == 0, done.output
    assert "[0] the cat on the mat\n" in done.stdout and "[1] the dog on the mat\n" in done.stdout
    events = [json.loads(line) for line in (await generate(router, "a", "b", "--json")).stdout.splitlines()]
    assert [event["prompt"] for event in events if event["event"] == "accepted"] == [0, 1]
    assert sorted(event["choice"] for event in events if event["event"] == "finish") == [0, 1]


async def test_calls_are_printed_as_calls(router: Router, peer: ScriptedDecode, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    peer.says = [f"I look. {CALL}\n{CALL}"]
    done = await generate(router, "Weather?", "--tools", str(tools))
    line = 'weather({"city": "Oslo", "days": 2})\n'
    assert done.stdout == f"I look.\n{line}{line}" and "tool_calls" in done.stderr
    one = await generate(router, "Weather?", "--tools", str(tools), "--one-call", "--tool-choice", "weather")
    assert one.stdout.count(line) == 1 and peer.asked[-1].sampling.lark  # it has to come
    unread = await generate(router, "Weather?", "--tools", str(tools), "--tool-choice", "none")
    assert unread.stdout == f"{peer.says[0]}\n"


async def test_options_of_the_prompt_reach_the_worker(router: Router, peer: ScriptedDecode, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is "}]))
    peer.says = ["me"]
    for flags, end in ((("--continue",), "It is "), (("--no-header",), "It is "), ((), "It is <|a|>")):
        await generate(router, "--messages", str(talk), *flags)
        assert peer.tokenizer.decode(peer.asked[-1].prompt_ids, skip_special_tokens=False).endswith(end)


async def test_sampling_that_no_flag_names_is_the_models_own(router: Router, peer: ScriptedDecode) -> None:
    await generate(router, "the cat")
    assert (peer.asked[-1].sampling.temperature, peer.asked[-1].sampling.top_k) == (0.5, 7)
    await generate(router, "the cat", "--temperature", "1")
    assert (peer.asked[-1].sampling.temperature, peer.asked[-1].sampling.top_k) == (1.0, 7)


async def test_what_cannot_be_is_refused_by_name(router: Router, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('[{"name": "f"}]')
    cases: list[tuple[list[str], str]] = [
        (["a", "b", "--chat"], "prompt"),
        (["a", "--tools", str(broken)], "--tools"),
        (["a", "--tools", str(tmp_path / "none.json")], "--tools"),
        (["a", "--echo", "--logprobs", "1"], "echo"),
        (["a", "--chat", "--echo"], "echo"),
        (["a", "--tool-choice", "auto"], "tool_choice"),
        (["a", "b", "--local"], "prompt"),
        (["a", "--echo", "--local"], "--echo"),
    ]
    for arguments, field in cases:
        done = await generate(router, *arguments)
        assert isinstance(done.exception, InvalidRequest) and done.exception.field == field, (arguments, done.exception)


async def test_every_flag_is_in_the_help() -> None:
    told = await run("generate", "--help")
    for flag in ("--echo", "--tools", "--tool-choice", "--continue", "--no-special-tokens", "--temperature", "--n "):
        assert flag in told.stdout
