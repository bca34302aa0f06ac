"""Requests that are given up at every moment around their end: no-ops or one clean cancellation each.

The moments are counted in turns of the event loop, so that every order of "it ends" and "it is
given up" that the loop allows comes about, and none depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest
import pytest_asyncio

from pdserve.errors import Cancelled
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from router.openai_stream import while_connected
from router.request import Ask, TokenPrompt
from tests.e2e.stack import FREE_S, MODEL, Stack, alone, pair, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt
from tests.router.support import bundle, model

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=3)
IDS = prompt(9)
BODY = (
    f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "the cat"}}], '
    '"max_tokens": 3, "ignore_eos": true, "stream": %s}'
)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def made() -> AsyncIterator[Stack]:
    async with pair() as it:
        yield it
        await it.check_free()
        expected = alone(IDS, GREEDY).ids
        assert [(await it.ask(IDS, GREEDY)).ids for _ in range(2)] == [expected] * 2


async def follow(made: Stack, token: asyncio.Event, seen: Counter[str]) -> None:
    """One request inside the router, to its end."""
    request = await made.router.intake.take(Ask(TokenPrompt(IDS), GREEDY), "default")
    async with aclosing(made.router.orchestrator.generate(request)) as events:
        async for event in events:
            if isinstance(event, TokenBatch):
                token.set()
            elif isinstance(event, Finish):
                seen["finished"] += 1


MOMENTS = [(False, 2**n) for n in range(11)] + [(True, n) for n in range(0, 48, 2)]


async def test_inside_the_router(made: Stack) -> None:
    """Given up 1, 2, 4, ... turns after it was taken, and 0, 2, 4, ... after its first token."""
    seen: Counter[str] = Counter()
    for after_token, count in MOMENTS:
        token = asyncio.Event()
        task = asyncio.create_task(follow(made, token, seen))
        if after_token:
            await token.wait()
        await turns(count)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        seen["cancelled" if task.cancelled() else "ended"] += 1
        assert not task.cancel(), "nothing is left to cancel"
    assert seen["cancelled"] and seen["ended"] == seen["finished"]
    assert seen["cancelled"] + seen["ended"] == len(MOMENTS)


async def test_through_the_gateway_under_load(made: Stack) -> None:
    """Thirty-two at a time, three of four given up at a turn of their own; whoever is not gets its answer."""
    expected = alone(IDS, GREEDY).ids

    async def one(number: int, pace: int) -> None:
        task = asyncio.create_task(made.ask(IDS, GREEDY))
        if number % 4:
            await turns(number * pace)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            assert task.result().ids == expected

    for pace in (1, 8, 64):
        await asyncio.gather(*(one(number, pace) for number in range(32)))


async def test_over_http() -> None:
    """A connection that breaks 0, 1, 2, 4, ... turns after its request, stream or not."""
    async with stack() as made:
        await made.add_prefill(WatchedEngine(model(), engine().config), bundle=bundle())
        await made.add_decode(WatchedEngine(model(), engine().config), bundle=bundle())
        host, port = made.router.http_address.rsplit(":", 1)
        for stream in ("true", "false"):
            body = BODY % stream
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            for count in (0, *(2**n for n in range(12))):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write((head + body).encode())
                await writer.drain()
                await turns(count)
                writer.transport.abort()
                del reader
        await made.check_free(FREE_S)
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
            answer = await http.post("/v1/chat/completions", content=BODY % "false")
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("hops", range(8))
async def test_work_that_ends_while_its_client_leaves_is_taken_or_cancelled(hops: int) -> None:
    """What ends with nobody to take it would leave its request running until its deadline."""
    leaves, outcome = asyncio.Event(), []

    async def receive() -> dict[str, str]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        await leaves.wait()
        try:
            await turns(hops)
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise
        outcome.append("ended")
        return "answer"

    asyncio.get_running_loop().call_later(0.001, leaves.set)
    try:
        taken = await while_connected(receive, work())
    except Cancelled:
        assert outcome in ([], ["cancelled"])
    else:
        assert taken == "answer" and outcome == ["ended"]
