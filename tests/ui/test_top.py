"""`pdserve top`, as scripts use it, in front of a real router."""

from __future__ import annotations

import asyncio

from rich.console import Console
from typer.testing import CliRunner, Result

from pdserve.cli.main import app
from pdserve.cli.top import bar, frame
from pdserve.client import AsyncClient
from pdserve.registry.records import DECODE
from pdserve.rpc.events import AttemptRecord, HandoffRecord
from router.waterfall import stages
from tests.engine.tiny import prompt
from tests.router.support import MODEL, VOCAB, contract, house, ids_of


async def top(*arguments: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["top", "--once", *arguments]))


async def test_one_frame_shows_pools_load_and_the_last_requests() -> None:
    async with house() as made:
        await made.add_ghost("stranger", DECODE, contract=contract(model_digest=b"x" * 32, vocab_size=VOCAB))
        address = made.router.address
        empty = await top("--gateway", address)
        assert empty.exit_code == 0 and "no request yet" in empty.output
        assert len(ids_of(await made.generate(prompt(20, seed=1, vocab=VOCAB), max_tokens=5, ignore_eos=True))) == 5
        done = await top("--gateway", address)
        assert done.exit_code == 0, done.output
        lines = done.output.splitlines()
        assert "pairs that fit: 1, refused: 1" in lines[0] and "0 in flight" in lines[0]
        (worker,) = [line.split() for line in lines if line.startswith("d0 ")]
        assert worker[1:5] == ["decode", "ready", MODEL, "cpu"]
        (request,) = [line for line in lines if "p0 -> d0" in line]
        assert "length" in request and " 20+5 " in request and request.rstrip().endswith("░")
        assert "p0 -> d0" not in (await top("--gateway", address, "--requests", "0")).output

        async with AsyncClient(address) as client:
            status = await client.status(recent=5)
        narrow = Console(width=60, no_color=True)
        with narrow.capture() as shown:
            narrow.print(frame(status, 1, "connection lost"))
        assert all(len(line) <= 60 for line in shown.get().splitlines()) and "connection lost" in shown.get()


async def test_without_a_router_it_says_what_to_do() -> None:
    result = await top("--gateway", "127.0.0.1:1")
    assert result.exit_code != 0 and "127.0.0.1:1" in str(result.exception)


def test_a_bar_is_as_long_as_its_stages() -> None:
    attempt = AttemptRecord(admitted_ms=10, prefill_ms=20, transfer_ms=10, first_token_ms=50, total_ms=100)
    found = stages(HandoffRecord(history=(attempt,), total_ms=100))
    assert bar(found, 320) == "·▓▓█▒░░░░░"
    assert bar(found, 0) == ""
