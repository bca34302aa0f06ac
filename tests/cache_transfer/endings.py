"""Handoffs that stand still half-way, and how each must end."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import (
    PdserveError,
)
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair

both_transports = pytest.mark.parametrize("kind", ["grpc", "memory", "shared"])
TOKENS = 8


async def start_gated(pair: Pair) -> tuple[bytes, asyncio.Task[object]]:
    """A running handoff whose first write waits in a thread; later layers are not announced."""
    pair.host.gated = True
    ticket, identity = pair.issue(TOKENS)
    sender = pair.sender(ticket, identity, pair.source(TOKENS))
    running: asyncio.Task[object] = asyncio.create_task(sender.run())
    sender.computed(0, (0, TOKENS))
    assert await asyncio.to_thread(pair.host.writing.wait, WAIT_S)
    return ticket.handoff_id, running


async def check_aborted(pair: Pair, error: type[PdserveError]) -> None:
    """The host was told once, after the last write."""
    async with asyncio.timeout(WAIT_S):
        await pair.host.over.wait()
    assert [type(e) for _, e in pair.host.failed] == [error]
    assert pair.host.done == []
    await pair.check_next_handoff_works()
