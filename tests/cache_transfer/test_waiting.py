"""Deadlines and drains, alone."""

from __future__ import annotations

import asyncio

import pytest

from cache_transfer.waiting import Deadline, settle
from pdserve.errors import (
    DataLoss,
    DeadlineExceeded,
)
from tests.cache_transfer.pages import WAIT_S


async def test_deadline_reports_what_was_waited_for() -> None:
    deadline = Deadline(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="the moon"):
        async with deadline:
            deadline.extend(0.0, "the moon")
            await asyncio.Event().wait()


async def test_deadline_keeps_the_first_interruption() -> None:
    deadline = Deadline(WAIT_S)
    deadline.interrupt(DataLoss("first"))
    deadline.interrupt(DataLoss("second"))
    with pytest.raises(DataLoss, match="first"):
        async with deadline:
            pass


async def test_settle_outlasts_cancellation() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settle((future,)))
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0)
    assert not done
    future.set_exception(DataLoss("seen"))
    with pytest.raises(asyncio.CancelledError):
        await task
