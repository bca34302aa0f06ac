"""How both clients say who asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.client import AsyncClient, Client, Finish
from pdserve.errors import ConfigError, Unauthenticated
from pdserve.rpc import convert
from pdserve.v1 import gateway_pb2 as pb
from tests.rpc.gateway import ScriptedGateway, serving

KEY = "sk-0123456789abcdef"


async def test_every_call_brings_the_key_and_none_without_one() -> None:
    seen: list[tuple[str, ...]] = []

    def note(context: Any) -> None:
        seen.append(tuple(value for name, value in context.invocation_metadata() if name == "authorization"))

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        note(context)
        yield pb.GenerateEvent(finish=convert.finish_to_proto(Finish("stop")))

    async def models(request: Any, context: Any) -> pb.ListModelsResponse:
        note(context)
        return pb.ListModelsResponse()

    async def status(request: Any, context: Any) -> pb.StatusResponse:
        note(context)
        return pb.StatusResponse()

    def plain(address: str, key: str) -> None:
        with Client(address, api_key=key) as client:
            client.complete("x")
            client.models()
            client.status()

    async with serving(ScriptedGateway(generate, models, status)) as server:
        for key in (KEY, ""):
            async with AsyncClient(server.address, api_key=key) as client:
                await client.complete("x")
                await client.models()
                await client.status()
            await asyncio.to_thread(plain, server.address, key)
    assert seen == [(f"Bearer {KEY}",)] * 6 + [()] * 6


async def test_who_has_no_key_is_told_the_argument() -> None:
    async def status(request: Any, context: Any) -> pb.StatusResponse:
        raise Unauthenticated("there is no API key", field="authorization", remedy="send a header")

    async with serving(ScriptedGateway(status=status)) as server, AsyncClient(server.address) as client:
        with pytest.raises(Unauthenticated) as caught:
            await client.status()
    assert str(caught.value) == "api_key: there is no API key (pass api_key= with a key of this router's)"


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY} {KEY}", f"{KEY}é", f"{KEY}\0"])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(make: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make("127.0.0.1:1", api_key=key)
    assert caught.value.field == "api_key" and KEY not in repr(caught.value) + str(caught.value)
