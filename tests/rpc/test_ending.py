"""Giving up a call ends it at the peer, at once, and leaves nothing of it here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest

from pdserve.errors import NotFound
from pdserve.rpc.channel import channel
from pdserve.rpc.ending import answer, give_up
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from tests.heap import heap_bytes
from tests.rpc.gateway import ScriptedGateway, serving

MODELS = gateway_pb2.ListModelsResponse(models=[gateway_pb2.ModelInfo(name="a")])


class Hanging:
    """Handlers that never answer, and count who has come and who is still there."""

    def __init__(self) -> None:
        self.came = self.left = 0
        self._changed = asyncio.Condition()

    async def models(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        await self._hang()
        return MODELS

    async def generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateEvent]:
        await self._hang()
        yield gateway_pb2.GenerateEvent()

    async def until(self, came: int, left: int) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: (self.came, self.left) == (came, left))

    async def _hang(self) -> None:
        self.came += 1
        try:
            async with self._changed:
                self._changed.notify_all()
            await asyncio.Event().wait()
        finally:
            self.left += 1
            async with self._changed:
                self._changed.notify_all()


Leave = Callable[[Any, Callable[[], Awaitable[None]]], Awaitable[None]]


async def leave_unary(stub: Any, arrived: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(answer(stub.ListModels(gateway_pb2.ListModelsRequest())))
    await arrived()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_a_read(stub: Any, arrived: Callable[[], Awaitable[None]]) -> None:
    call = stub.Generate(gateway_pb2.GenerateRequest())
    task = asyncio.create_task(call.read())
    await arrived()
    await give_up(call, task)
    assert task.done() and call.cancelled()


@pytest.mark.parametrize(("leave", "most"), [(leave_unary, 600), (leave_a_read, 400)])
async def test_calls_that_are_given_up_end_at_the_peer_and_are_freed(leave: Leave, most: int) -> None:
    """`most` bytes may stay of a call, as the server is here, too: 200, and 1,400 of a unary call that is not freed."""
    hanging = Hanging()
    gateway = ScriptedGateway(generate=hanging.generate, models=hanging.models)
    async with serving(gateway) as server, channel(server.address) as connection:
        stub = gateway_pb2_grpc.GatewayStub(connection)

        async def many(first: int, end: int) -> None:
            for number in range(first, end):
                await leave(stub, partial(hanging.until, number + 1, number))
                await hanging.until(number + 1, number + 1)

        await many(0, 100)
        before = heap_bytes()
        await many(100, 300)
        assert heap_bytes() - before < 200 * most


async def test_an_answer_and_an_error_come_as_they_are() -> None:
    async def none(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        raise NotFound("no such model", field="model", remedy="ask for another")

    async def some(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return MODELS

    for models in (some, none):
        async with serving(ScriptedGateway(models=models)) as server, channel(server.address) as connection:
            call = gateway_pb2_grpc.GatewayStub(connection).ListModels(gateway_pb2.ListModelsRequest())
            if models is some:
                assert await answer(call) == MODELS
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(call)
            assert isinstance(from_rpc_error(caught.value), NotFound)
