"""Events between a request's task and its client: merged, bounded, and ended by an error if there was one."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import Cancelled, DataLoss
from pdserve.rpc.events import Accepted, Finish, PositionLogprobs, TokenBatch, TokenLogprob
from router.backlog import Backlog


def batch(index: int, text: bytes = b"") -> TokenBatch:
    return TokenBatch(index, (index,), text, (PositionLogprobs(TokenLogprob(index, -1.0, 0)),))


async def test_unread_tokens_merge_without_loss() -> None:
    backlog = Backlog(limit=100)
    await backlog.put(Accepted("r", "m", 1, 2))
    for index, piece in enumerate([b"\xe2\x82", b"\xac", b"!"]):
        await backlog.put(batch(index, piece))
    await backlog.put(Finish("stop"))
    assert isinstance(await backlog.get(), Accepted)
    merged = await backlog.get()
    assert isinstance(merged, TokenBatch)
    assert (merged.first_index, merged.ids, merged.text) == (0, (0, 1, 2), "€!".encode())
    assert [position.chosen.id for position in merged.logprobs] == [0, 1, 2]
    assert isinstance(await backlog.get(), Finish)


async def test_a_full_backlog_makes_the_producer_wait() -> None:
    backlog = Backlog(limit=2)
    await backlog.put(batch(0))
    await backlog.put(batch(1))
    third = asyncio.create_task(backlog.put(batch(2)))
    done, _ = await asyncio.wait({third}, timeout=0.05)
    assert not done
    first = await backlog.get()
    async with asyncio.timeout(5):
        await third
    second = await backlog.get()
    assert isinstance(first, TokenBatch) and isinstance(second, TokenBatch)
    assert first.ids + second.ids == (0, 1, 2)


async def test_the_producers_error_comes_after_its_events() -> None:
    backlog = Backlog(limit=8)

    async def produce() -> None:
        await backlog.put(batch(0))
        raise DataLoss("a byte")

    asyncio.create_task(produce()).add_done_callback(backlog.ended)
    assert isinstance(await backlog.get(), TokenBatch)
    with pytest.raises(DataLoss):
        await backlog.get()


async def test_a_cancelled_producer_is_an_error_and_a_finished_one_is_the_end() -> None:
    async def nothing() -> None:
        return

    backlog = Backlog(limit=8)
    asyncio.create_task(nothing()).add_done_callback(backlog.ended)
    assert await backlog.get() is None

    backlog = Backlog(limit=8)
    task = asyncio.create_task(asyncio.Event().wait())
    task.add_done_callback(backlog.ended)  # type: ignore[arg-type]
    task.cancel()
    with pytest.raises(Cancelled):
        await backlog.get()
