"""The end of a drain: requests still in flight end with a typed error, at every door, before the doors close."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdserve.client import AsyncClient
from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from router.app import FAREWELL_S
from tests.engine.tiny import prompt
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.support import MODEL, VOCAB, House, house

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
IDS = prompt(20, seed=2, vocab=VOCAB)


@asynccontextmanager
async def endless(tokens: int) -> AsyncIterator[House]:
    """A house whose requests never end, after so many tokens."""
    async with house() as made:
        if tokens:
            peer: BadDecode | BadPrefill = BadDecode(made.decodes[0].contract, tokens=tokens, wait=asyncio.Event())
        else:
            peer = BadPrefill()
        async with serving(peer) as address:
            await made.add_ghost("endless", DECODE if tokens else PREFILL, address)
            busy = made.make_look_busy("d0" if tokens else "p0")
            yield made
            made.router.pool.end(busy)


async def until_active(made: House, count: int) -> None:
    async with asyncio.timeout(5):
        while made.router.orchestrator.active < count:
            async with asyncio.timeout(1):
                await asyncio.to_thread(lambda: None)  # lets the event loop turn


async def drained(made: House) -> None:
    async with asyncio.timeout(FAREWELL_S + 5):
        await made.router.drain(0.0)
    assert made.router.orchestrator.active == 0


async def test_an_answer_that_has_not_begun_is_a_503_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with endless(0) as made, httpx.AsyncClient(timeout=20) as http:
            url = f"http://{made.router.http_address}/v1/chat/completions"
            posts = [asyncio.create_task(http.post(url, json={**BODY, "stream": stream})) for stream in (False, True)]
            await until_active(made, 2)
            await drained(made)
            for post in posts:
                answer = await post
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert not caplog.records


async def test_a_stream_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with endless(3) as made, httpx.AsyncClient(timeout=20) as http:
            url = f"http://{made.router.http_address}/v1/chat/completions"
            async with http.stream("POST", url, json={**BODY, "stream": True}) as answer:
                lines = answer.aiter_lines()
                events = [await anext(lines)]
                await drained(made)
                events += [line async for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "draining"
    assert "x" in "".join(json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events[:-1])
    assert not caplog.records


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_grpc_call_ends_with_its_detail(tokens: int) -> None:
    async with endless(tokens) as made, AsyncClient(made.router.address) as client:
        call = asyncio.create_task(client.complete(token_ids=IDS))
        await until_active(made, 1)
        await drained(made)
        with pytest.raises(Unavailable) as caught:
            await call
    check(caught.value)


async def test_a_request_that_comes_to_the_orchestrator_after_the_end_is_refused() -> None:
    async with house() as made:
        made.router.orchestrator.end()
        with pytest.raises(Unavailable) as caught:
            await made.generate(IDS)
        check(caught.value)


def check(error: PdserveError) -> None:
    assert (error.reason, error.field, error.retryable) == ("DRAINING", "router", True)
    assert error.remedy
