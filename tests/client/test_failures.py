"""Whatever ends an answer early is one typed error, in bounded time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import (
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    FieldDifference,
    Incompatible,
    PdserveError,
    Unavailable,
)
from pdserve.rpc.events import TokenBatch
from pdserve.rpc.settings import RpcSettings
from pdserve.v1 import gateway_pb2 as pb
from tests.client.answers import ACCEPTED, BATCHES, FINISH, Ask, answering, hanging, message
from tests.rpc.gateway import ScriptedGateway, serving

DIFF = Incompatible(
    "no pair of workers fits",
    field="LAYERS",
    remedy="start workers of one model",
    differences=(FieldDifference("LAYERS", "2", "3"), FieldDifference("KV_DTYPE", "fp32", "bf16", "lossy")),
)


async def test_a_refusal_carries_the_servers_diff(ask: Ask) -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if request.text:
            raise DIFF
        yield message(FINISH)

    async with serving(ScriptedGateway(generate=refuse)) as server:
        with pytest.raises(Incompatible) as caught:
            await ask(server.address, "generate", "x")
    assert vars(caught.value) == vars(DIFF)


@pytest.mark.parametrize("error", [DIFF, Exhausted("full", retry_after_ms=50), Unavailable("decode-a died")])
async def test_an_error_event_in_the_stream_is_raised(ask: Ask, error: PdserveError) -> None:
    async with serving(answering(ACCEPTED, BATCHES[0], error)) as server:
        with pytest.raises(type(error)) as caught:
            await ask(server.address, "generate", "x")
    assert vars(caught.value) == vars(error)


async def test_an_answer_without_a_finish_is_an_error(ask: Ask) -> None:
    async with serving(answering(ACCEPTED, BATCHES[0])) as server:
        for method in ("generate", "complete"):
            with pytest.raises(Unavailable) as caught:
                await ask(server.address, method, "x")
            assert caught.value.reason == "STREAM_CUT"


@pytest.mark.parametrize("batches", [(BATCHES[1],), (BATCHES[0], BATCHES[0]), (BATCHES[0], BATCHES[2])])
async def test_lost_or_repeated_tokens_are_an_error(ask: Ask, batches: tuple[TokenBatch, ...]) -> None:
    async with serving(answering(ACCEPTED, *batches, FINISH)) as server:
        with pytest.raises(DataLoss):
            await ask(server.address, "generate", "x")


async def test_a_deadline_is_typed(ask: Ask) -> None:
    async with serving(hanging(asyncio.Event(), asyncio.Event())) as server:
        with pytest.raises(DeadlineExceeded) as caught:
            await ask(server.address, "generate", "x", timeout_s=0.3)
    told = "timeout_s: no complete answer within 0.3 s (raise timeout_s, or lower max_tokens)"
    assert str(caught.value) == told


async def test_a_routers_own_limit_keeps_its_own_remedy(ask: Ask) -> None:
    own = DeadlineExceeded("stopped after 1 s", field="deadline", remedy="allow more time")
    async with serving(answering(ACCEPTED, own)) as server:
        with pytest.raises(DeadlineExceeded) as caught:
            await ask(server.address, "generate", "x", timeout_s=60)
    assert vars(caught.value) == vars(own)


async def test_an_unreachable_address_is_unavailable_with_a_remedy(ask: Ask, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    for method, args in (("generate", ("x",)), ("complete", ("x",)), ("models", ()), ("status", ())):
        began = time.monotonic()
        with pytest.raises(Unavailable, match=address) as caught:
            await ask(address, method, *args)
        assert time.monotonic() - began < 5
        assert str(caught.value) == f"{address}: connection refused (check that a server listens at {address})"


async def test_a_peer_that_accepts_and_stays_silent_is_unavailable_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address, RpcSettings(connect_timeout_s=0.3)) as client:
            began = time.monotonic()
            with pytest.raises(Unavailable, match=address):
                await client.complete("x")
            assert time.monotonic() - began < 10
