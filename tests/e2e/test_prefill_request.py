"""What prefill is asked for is made for prefill, not cut from the client's body; and it is never done elsewhere.

An option of the whole request that reached prefill would show: a limit of one token, a minimum
that cannot be met, a stream that somebody waits for, a time limit for the wrong thing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from pdserve.errors import Unavailable
from pdserve.request import SamplingParams
from tests.e2e.resuming import BUNDLE, FIRST_SPECIAL, alone
from tests.e2e.stack import MODEL, Stack, pause, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt

IDS = prompt(30, seed=8, vocab=FIRST_SPECIAL)
ENDS = tuple(range(12))  # one token in eight ends an answer, after a hundred
PARAMS = SamplingParams(temperature=0.9, seed=4, min_tokens=100, stop_token_ids=ENDS)
PREFILL_S = 2.0
# Shorter than the prefill takes, all that do not count it.
SHORT: dict[str, Any] = {"admit_timeout_s": 1.5, "inter_token_timeout_s": 1.0, "settle_s": 0.5, "client_stall_s": 1.5}


@asynccontextmanager
async def slow() -> AsyncIterator[tuple[Stack, WatchedEngine]]:
    """Service whose prefill takes seconds, once it has begun."""
    prefill = engine()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    served = replace(BUNDLE, chat_template=template)
    async with stack(**SHORT) as made:
        await made.add_prefill(prefill, bundle=served)
        await made.add_decode(bundle=served)
        yield made, prefill


async def held_for_a_while(prefill: WatchedEngine) -> None:
    with prefill.held():
        async with asyncio.timeout(WAIT_S):
            await prefill.inside.wait()
        await pause(PREFILL_S)


async def test_over_grpc() -> None:
    expected = alone(PARAMS, IDS)
    async with slow() as (made, prefill):
        holding = asyncio.create_task(held_for_a_while(prefill))
        answer = await made.ask(IDS, PARAMS)
        await holding
        assert (answer.ids, answer.text) == (expected.ids, expected.text.decode(errors="replace"))
        assert (answer.finish.reason, answer.finish.stop_token_id) == (
            expected.finish.reason,
            expected.finish.stop_token_id,
        )
        assert answer.record is not None and answer.record.attempts == 1
        assert answer.record.prefill_ms > 1000 * PREFILL_S
        assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (len(IDS), len(expected.ids))
    assert expected.finish.stop_token_id in ENDS and len(expected.ids) > 100


@pytest.mark.parametrize("stream", [True, False])
async def test_over_http(stream: bool) -> None:
    expected = alone(PARAMS, IDS)
    content = "".join(chr(0x21 + token) for token in IDS)
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": PARAMS.temperature,
        "seed": PARAMS.seed, "min_tokens": PARAMS.min_tokens, "stop_token_ids": ENDS, "stream": stream,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with slow() as (made, prefill):
        holding = asyncio.create_task(held_for_a_while(prefill))
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
            answer = await http.post("/v1/chat/completions", json=body)
        await holding
        assert answer.status_code == 200
        if stream:
            data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert data.pop() == "[DONE]"
            *chunks, last = map(json.loads, data)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert last["choices"] == []
        else:
            last = answer.json()
            text = last["choices"][0]["message"]["content"]
        assert text == expected.text.decode(errors="replace")
        usage = last["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), len(expected.ids))


async def test_without_a_prefill_pool_nobody_else_does_it() -> None:
    decode = engine()
    async with stack() as made:
        await made.add_decode(decode, bundle=BUNDLE)
        with pytest.raises(Unavailable) as caught:
            await made.ask(IDS, PARAMS)
        assert (caught.value.reason, caught.value.field) == ("NO_PREFILL_WORKER", "model")
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_prefill_worker")
            assert (await http.get("/readyz")).status_code == 503
        # Nor does a worker of the other pool take over that has the prompt already.
        await made.add_prefill(bundle=BUNDLE)
        answer_ids = (await made.ask(IDS, PARAMS)).ids
        steps = len(decode.steps)
        await made.remove(made.prefills[0])
        with pytest.raises(Unavailable) as again:
            await made.ask(IDS, PARAMS)
        assert again.value.reason == "NO_PREFILL_WORKER"
        assert len(decode.steps) == steps == len(answer_ids) - 1
