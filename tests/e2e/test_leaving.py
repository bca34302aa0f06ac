"""Clients that go away with everything on that could hide it: TLS, keys, records, tools, grammars, log
probabilities, several choices.

Within two seconds no engine works for them, and every page is back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.client import AsyncClient
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER
from router.tenants import Tenant
from tests.e2e.stack import FREE_S, MODEL, Stack, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.router.support import bundle, model
from tests.router.tools import HERMES_TEMPLATE, TOOLS
from tests.rpc.certificates import make_certificates, rpc_of

KEY = "sk-acme-0123456789abcdef"
COMMON = {
    "model": MODEL, "temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "top_k": 50, "seed": 3, "max_tokens": 150,
    "min_tokens": 100, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "logit_bias": {"5": 1}, "stop": ["never", "ever"], "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
CHAT: dict[str, Any] = {
    **COMMON, "messages": [{"role": "user", "content": "the cat sat"}], "logprobs": True, "top_logprobs": 5,
    "pdserve_record": True,
}  # fmt: skip
HTTP: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat with log probabilities": ("chat/completions", CHAT),
    "a chat with a tool that must be called": ("chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
    "a chat in JSON": ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "a chat with several choices": ("chat/completions", {**CHAT, "n": 3}),
    "several prompts with echo": ("completions", {**COMMON, "prompt": ["the cat", "the dog", "a log"], "echo": True}),
    "log probabilities of a completion": (
        "completions", {**COMMON, "prompt": "the cat", "logprobs": 5, "pdserve_record": True}
    ),
}  # fmt: skip
GRPC: dict[str, Any] = {
    "messages": CHAT["messages"], "regex": "[a-z ]{120}", "logprobs": 5, "want_record": True, "seed": 3,
    "max_tokens": 150, "stop": ("never",), "repetition_penalty": 1.1, "logit_bias": {5: 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[tuple[Stack, WatchedEngine]]:
    """An installation that wants a key and certificates; and the engine of its decode worker."""
    with_tools = dataclasses.replace(bundle(), chat_template=HERMES_TEMPLATE)
    prefill, decode = (WatchedEngine(model(context=1024), engine(pages=512).config) for _ in range(2))
    options = {"caller": rpc_of(folder, CLIENT), "operator": rpc_of(folder, OPERATOR), "rpc": rpc_of(folder, ROUTER)}
    async with stack(tenants=(Tenant.of("acme", KEY),), disaggregate="auto", **options) as made:
        await made.add_prefill(prefill, bundle=with_tools, rpc=rpc_of(folder, WORKER))
        await made.add_decode(decode, bundle=with_tools, rpc=rpc_of(folder, WORKER))
        yield made, decode


async def leave(made: Stack, decode: WatchedEngine, asking: asyncio.Task[Any]) -> None:
    """The client goes while a step for it stands still: no other step may follow."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait({asking, inside := asyncio.create_task(decode.inside.wait())}, return_when="FIRST_COMPLETED")
    assert inside.done(), asking.result()
    before = len(decode.steps)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await made.until(lambda: all(s.ending is not None for s in made.decodes[0].pipeline.sequences), FREE_S)
    decode.let_go()
    await made.check_free(FREE_S)
    assert len(decode.steps) <= before + 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("what", HTTP)
async def test_over_http(folder: Path, what: str, stream: bool) -> None:
    path, body = HTTP[what]
    body = {**body, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    async with secured(folder) as (made, decode):
        address = f"https://localhost:{made.router.http_address.rpartition(':')[2]}/v1/{path}"
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(headers=headers, verify=trusting, timeout=WAIT_S) as http:
            with decode.held():
                await leave(made, decode, asyncio.create_task(http.post(address, json=body)))


async def test_over_grpc(folder: Path) -> None:
    async with (
        secured(folder) as (made, decode),
        AsyncClient(made.router.address, rpc_of(folder, CLIENT), api_key=KEY) as client,
    ):
        with decode.held():
            await leave(made, decode, asyncio.create_task(client.complete(**GRPC)))
