"""The queue between a sequence and its reader."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.contract import Ticket
from decode_worker.stream import EventStream
from pdserve.errors import Internal, Refused
from pdserve.rpc.events import LENGTH, Finish, TokenBatch

TICKET = Ticket(b"h" * 16, 1, b"i" * 16, b"s" * 32, 1000, 0, ())


def token(index: int, text: bytes = b"") -> TokenBatch:
    return TokenBatch(index, (index,), text)


async def test_tokens_that_wait_are_merged_in_order() -> None:
    stream = EventStream(limit=100)
    for event in (TICKET, token(0, b"a"), token(1), token(2, b"b"), Finish(LENGTH)):
        stream.put(event)
    assert [await stream.next() for _ in range(3)] == [TICKET, TokenBatch(0, (0, 1, 2), b"ab"), Finish(LENGTH)]
    with pytest.raises(Internal):
        await stream.next()


async def test_a_reader_that_waits_is_woken() -> None:
    stream = EventStream(limit=100)
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(token(0))
    async with asyncio.timeout(1):
        assert await reader == token(0)


async def test_an_error_comes_after_what_waits_and_nothing_after_it() -> None:
    stream = EventStream(limit=100)
    stream.put(token(0))
    stream.fail(Refused("over"))
    stream.put(token(1))
    stream.fail(Refused("again"))
    assert await stream.next() == token(0)
    for _ in range(2):
        with pytest.raises(Refused, match="over"):
            await stream.next()


async def test_full_is_told_with_its_time_and_so_is_room() -> None:
    now, rooms = [5.0], list[float]()
    stream = EventStream(2, lambda: rooms.append(now[0]), lambda: now[0])
    stream.put(token(0))
    assert not stream.full_since
    stream.put(token(1))
    now[0] = 6.0
    stream.put(token(2))
    assert (stream.full_since, stream.unread, rooms) == (5.0, 3, [])
    await stream.next()
    assert (stream.unread, rooms) == (0, [6.0])
    stream.put(token(3))
    assert not stream.full_since
