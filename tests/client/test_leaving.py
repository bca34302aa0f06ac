"""Leaving, cancelling and closing end a call at the server, and leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from contextlib import aclosing

import pytest

from pdserve.client import AsyncClient, Client, Event, Tokens
from pdserve.errors import Cancelled, Refused
from tests.client.answers import ACCEPTED, BATCHES, FINISH, answering, hanging
from tests.rpc.gateway import serving


async def test_breaking_out_of_the_async_iterator_cancels_the_call() -> None:
    cancelled = asyncio.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server, AsyncClient(server.address) as client:
        async for _ in client.generate("x"):
            break
        async with asyncio.timeout(5):
            await cancelled.wait()


async def test_aclosing_cancels_the_call() -> None:
    cancelled = asyncio.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server, AsyncClient(server.address) as client:
        async with aclosing(client.generate("x")) as events:
            await anext(events)
        async with asyncio.timeout(5):
            await cancelled.wait()


class _Heap(ctypes.Structure):
    """As `mallinfo2` of glibc tells it, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "_", "_", "mapped", "_", "_", "used", "unused", "_")  # mallinfo2(3)
    ]


def heap_bytes() -> int:
    """In use outside of Python's own small objects: what gRPC holds is there, and no tool of Python's sees it."""
    gc.collect()
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = _Heap
    return int(asked().used)


async def test_calls_that_were_left_are_freed() -> None:
    async with (
        serving(hanging(asyncio.Event(), asyncio.Event())) as server,
        AsyncClient(server.address) as client,
    ):

        async def leave(count: int) -> None:
            for _ in range(count):
                async with aclosing(client.generate("x")) as events:
                    await anext(events)

        await leave(100)
        before = heap_bytes()
        await leave(200)
        assert heap_bytes() - before < 200 * 1000


async def test_cancelling_the_task_cancels_the_call() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server, AsyncClient(server.address) as client:
        task = asyncio.create_task(client.complete("x"))
        async with asyncio.timeout(5):
            await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await cancelled.wait()


async def test_closing_the_async_client_ends_its_calls_with_a_typed_error() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server:
        client = AsyncClient(server.address)
        task = asyncio.create_task(client.complete("x"))
        async with asyncio.timeout(5):
            await started.wait()
        await client.close()
        with pytest.raises(Cancelled):
            async with asyncio.timeout(5):
                await task
        async with asyncio.timeout(5):
            await cancelled.wait()
        with pytest.raises(Refused, match="closed"):
            await client.models()
        await client.close()


async def test_breaking_out_of_the_sync_iterator_cancels_the_call() -> None:
    cancelled = asyncio.Event()

    def use(address: str) -> list[Event]:
        with Client(address) as client:
            for event in client.generate("x"):
                assert isinstance(event, Tokens)
                break
            gc.collect()
            left.set()
            assert may_close.wait(10)
            return []

    left, may_close = threading.Event(), threading.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server:
        using = asyncio.create_task(asyncio.to_thread(use, server.address))
        async with asyncio.timeout(5):  # while the client is still open
            await cancelled.wait()
        may_close.set()
        await using
        assert left.is_set()


async def test_closing_the_sync_client_ends_its_calls_with_a_typed_error() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server:
        client = Client(server.address)
        call = asyncio.create_task(asyncio.to_thread(client.complete, "x"))
        async with asyncio.timeout(5):
            await started.wait()
        await asyncio.to_thread(client.close)
        with pytest.raises(Cancelled):
            async with asyncio.timeout(5):
                await call
        async with asyncio.timeout(5):
            await cancelled.wait()
        with pytest.raises(Refused, match="closed"):
            client.models()


async def test_threads_share_a_sync_client() -> None:
    async with serving(answering(ACCEPTED, *BATCHES, FINISH)) as server:
        with Client(server.address) as client:
            answers = await asyncio.gather(*(asyncio.to_thread(client.complete, "x") for _ in range(8)))
    assert [answer.text for answer in answers] == ["café 😀"] * 8


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with serving(answering(ACCEPTED, *BATCHES, FINISH)) as server, AsyncClient(server.address) as client:
        await client.complete("x")
        async with aclosing(client.generate("x")) as events:
            await anext(events)
    left = asyncio.all_tasks() - before
    if left:  # gRPC's own, of the server that was just stopped
        await asyncio.wait(left, timeout=5)
    assert asyncio.all_tasks() - before == set()
