"""What can never work, through gRPC and HTTP, while a good request is in the middle of its answer.

Each bad request gets one clear error with the right status and field; the good one gets the
answer that it would get alone; nothing stays held.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdserve.client.events import Tokens
from pdserve.engine.engine import Engine
from pdserve.engine.plan import EngineConfig
from pdserve.errors import PdserveError
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from pdserve.v1.common_pb2 import SamplingOptions
from tests.e2e.stack import Stack, alone_on, read_tokens, stack
from tests.e2e.watched import WAIT_S, WatchedEngine
from tests.engine.tiny import prompt
from tests.router.support import CONTEXT, VOCAB, bundle, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, IDS, RAISES = "text", "ids", "raises"  # served models: with a tokenizer, without one, with a template that raises
POOL = 200  # tokens that fit the pages of TEXT's workers; fewer than its context
ENGINE = EngineConfig(dtype="fp32", pages=POOL // 4, page_size=4, deterministic=True)
GOOD_IDS = prompt(30, seed=1, vocab=VOCAB)
GOOD = SamplingParams(seed=7, max_tokens=12, temperature=0.9, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Stack]:
    async with stack() as it:
        await it.add_prefill(WatchedEngine(model(), ENGINE), bundle=bundle(), name=TEXT)
        await it.add_decode(WatchedEngine(model(), ENGINE), bundle=bundle(), name=TEXT)
        await it.add_prefill(name=IDS)
        await it.add_decode(name=IDS)
        raising = dataclasses.replace(bundle(), chat_template="{{ raise_exception('roles must alternate') }}")
        await it.add_prefill(WatchedEngine(model(), ENGINE), bundle=raising, name=RAISES)
        await it.add_decode(WatchedEngine(model(), ENGINE), bundle=raising, name=RAISES)
        yield it


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """The good request's answer from one process."""
    return alone_on(LocalRunner(Engine(model(), ENGINE), bundle()), GOOD_IDS, GOOD).ids


@asynccontextmanager
async def undisturbed(made: Stack, expected: tuple[int, ...]) -> AsyncIterator[None]:
    """A good request stands in the middle of its answer meanwhile; it must end as if nothing else had been."""
    decode = made.decodes[0].engine
    assert isinstance(decode, WatchedEngine)
    good = made.client.generate(token_ids=GOOD_IDS, sampling=GOOD, model=TEXT, timeout_s=60.0)
    async with aclosing(good) as events:
        with decode.held():
            ids = await read_tokens(events, 1)
            async with asyncio.timeout(WAIT_S):
                await decode.inside.wait()
            await made.until(lambda: not made.prefills[0].blocks.held_count)
            before = [(w.blocks.held_count, w.blocks.cached_count) for w in made.workers]
            yield
            assert [(w.blocks.held_count, w.blocks.cached_count) for w in made.workers] == before
        async for event in events:
            ids += event.ids if isinstance(event, Tokens) else ()
    assert ids == expected
    await made.check_free()


def asked(ids: Any = (1, 2, 3), model: str = TEXT, **sampling: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        model=model, tokens=gateway_pb2.TokenPrompt(ids=ids), sampling=SamplingOptions(**sampling)
    )


SAID = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="the cat")])
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
GRPC: dict[str, tuple[gateway_pb2.GenerateRequest, grpc.StatusCode, str, str]] = {
    "no prompt": (gateway_pb2.GenerateRequest(model=TEXT), INVALID, "prompt", "EMPTY_PROMPT"),
    "no ids": (asked([]), INVALID, "prompt", "EMPTY_PROMPT"),
    "no text": (gateway_pb2.GenerateRequest(model=TEXT, text=""), INVALID, "prompt", "EMPTY_PROMPT"),
    "no messages": (
        gateway_pb2.GenerateRequest(model=TEXT, chat=gateway_pb2.ChatPrompt()), INVALID, "messages", "EMPTY_PROMPT"
    ),
    "negative id": (asked([5, -1]), INVALID, "prompt", "TOKEN_OUT_OF_RANGE"),
    "id out of range": (asked([5, VOCAB]), INVALID, "prompt", "TOKEN_OUT_OF_RANGE"),
    "longer than the context": (asked([1] * (CONTEXT + 1)), INVALID, "prompt", "PROMPT_TOO_LONG"),
    "longer than the pool": (asked([1] * (POOL + 1)), INVALID, "prompt", "PROMPT_TOO_LONG"),
    "temperature is not a number": (asked(temperature=math.nan), INVALID, "temperature", "INVALID_TEMPERATURE"),
    "temperature is infinite": (asked(temperature=math.inf), INVALID, "temperature", "INVALID_TEMPERATURE"),
    "negative temperature": (asked(temperature=-0.1), INVALID, "temperature", "INVALID_TEMPERATURE"),
    "unknown model": (asked(model="gpt"), NOT_FOUND, "model", "UNKNOWN_MODEL"),
    "no model of two": (asked(model=""), INVALID, "model", "MODEL_REQUIRED"),
    "bias of an unknown id": (asked(logit_bias={VOCAB: 1.0}), INVALID, "logit_bias", "INVALID_LOGIT_BIAS"),
    "bias of a negative id": (asked(logit_bias={-1: 1.0}), INVALID, "logit_bias", "INVALID_LOGIT_BIAS"),
    "bias is not a number": (asked(logit_bias={1: math.nan}), INVALID, "logit_bias", "INVALID_LOGIT_BIAS"),
    "unknown stop id": (asked(stop_token_ids=[VOCAB]), INVALID, "stop_token_ids", "INVALID_STOP_TOKEN_IDS"),
    "stop string without a tokenizer": (asked(model=IDS, stop=["x"]), INVALID, "stop", "NO_TOKENIZER"),
    "text without a tokenizer": (gateway_pb2.GenerateRequest(model=IDS, text="x"), INVALID, "prompt", "NO_TOKENIZER"),
    "a template that raises": (
        gateway_pb2.GenerateRequest(model=RAISES, chat=SAID), INVALID, "messages", "CHAT_TEMPLATE"
    ),
    "no output": (asked(max_tokens=0), INVALID, "max_tokens", "INVALID_MAX_TOKENS"),
    "more output than there is room": (asked(min_tokens=POOL), INVALID, "min_tokens", "INVALID_MIN_TOKENS"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(GRPC))
async def test_over_grpc(shared: Stack, expected: tuple[int, ...], name: str) -> None:
    request, code, field, reason = GRPC[name]
    async with undisturbed(shared, expected), channel(shared.router.address) as link:
        call = gateway_pb2_grpc.GatewayStub(link).Generate(request, timeout=WAIT_S)
        events = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                events.append(event)
        assert events == [] and caught.value.code() is code
        error = from_rpc_error(caught.value)
        assert (error.field, error.reason, error.retryable) == (field, reason, False)
        check_clear(error)


def check_clear(error: PdserveError) -> None:
    """One line that says what is wrong and what to do."""
    assert error.message and error.remedy
    assert "\n" not in str(error) and "Traceback" not in str(error)


USER = [{"role": "user", "content": "the cat"}]
LONG = [{"role": "user", "content": "the cat sat on the mat " * 100}]
HTTP: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "no messages": ({"messages": []}, 400, "messages", "empty_prompt"),
    "longer than the pool": ({"messages": LONG}, 400, "prompt", "prompt_too_long"),
    "temperature is not a number": ({"temperature": math.nan}, 400, "temperature", "invalid_temperature"),
    "negative temperature": ({"temperature": -0.1}, 400, "temperature", "invalid_temperature"),
    "temperature is text": ({"temperature": "hot"}, 400, "temperature", "invalid_field"),
    "unknown model": ({"model": "gpt"}, 404, "model", "model_not_found"),
    "bias of an unknown id": ({"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias", "invalid_logit_bias"),
    "bias of a negative id": ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_logit_bias"),
    "bias of no id": ({"logit_bias": {"cat": 1}}, 400, "logit_bias", "invalid_field"),
    "a model without a tokenizer": ({"model": IDS}, 400, "prompt", "no_tokenizer"),
    "a template that raises": ({"model": RAISES}, 400, "messages", "chat_template"),
    "unknown stop id": ({"stop_token_ids": [VOCAB]}, 400, "stop_token_ids", "invalid_stop_token_ids"),
    "unknown field": ({"temprature": 1}, 400, "temprature", "unknown_field"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", list(HTTP))
async def test_over_http(shared: Stack, expected: tuple[int, ...], name: str, stream: bool) -> None:
    changes, status, param, code = HTTP[name]
    body = json.dumps({"model": TEXT, "messages": USER, "max_tokens": 4, "stream": stream} | changes)
    async with (
        undisturbed(shared, expected),
        httpx.AsyncClient(base_url=f"http://{shared.router.http_address}", timeout=WAIT_S) as http,
    ):
        answer = await http.post("/v1/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == status and answer.headers["content-type"] == "application/json"
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert error["message"] and "\n" not in error["message"]


async def test_all_at_once(shared: Stack, expected: tuple[int, ...]) -> None:
    """None of them waits for another, or for the good request."""
    async with undisturbed(shared, expected), channel(shared.router.address) as link:
        stub = gateway_pb2_grpc.GatewayStub(link)
        calls = [stub.Generate(request, timeout=WAIT_S) for request, _, _, _ in GRPC.values()]
        async with asyncio.timeout(WAIT_S):
            codes = await asyncio.gather(*(call.code() for call in calls))
        assert codes == [code for _, code, _, _ in GRPC.values()]
