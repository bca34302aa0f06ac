"""A pool full of caches that nobody finishes or reads empties by itself: no request, no push, only the timer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from cache_transfer.sender import HandoffSender
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.request import SamplingParams
from tests.decode_worker.rig import WAIT_S, Call, Rig, local, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=2, seed=0)
LENGTH = 11  # three pages of four tokens with the output
POOL = 9


async def half_pushed(r: Rig, opened: AsyncExitStack, number: int) -> tuple[Call, asyncio.Task[object]]:
    """A request whose push has its grant and one layer, and then falls silent."""
    ids = prompt(LENGTH, seed=number)
    call = await opened.enter_async_context(r.call(ids, PARAMS, request_id=str(number)))
    sender: HandoffSender = r.sender(await call.admitted(), r.prefill.compute(ids), layers=1, deadline_s=3 * WAIT_S)
    return call, asyncio.create_task(sender.run())


async def test_a_pool_of_half_pushed_caches_empties_with_no_new_traffic() -> None:
    async with rig(decode=tiny_engine(pages=POOL, deterministic=True), receive_s=1.0, ticket_ttl_s=1.0) as r:
        async with AsyncExitStack() as opened:
            pushes = [await half_pushed(r, opened, number) for number in range(3)]
            await r.describe_until(lambda: r.worker.blocks.held_count >= 6)  # the third may have to wait for pages
            for call, push in pushes:  # reading what the timer ends; nothing is sent
                with pytest.raises(DeadlineExceeded) as caught:
                    await call.answer()
                assert caught.value.reason in ("RECEIVE_TIMEOUT", "TICKET_EXPIRED")
                with pytest.raises(PdserveError):
                    await push
            async with asyncio.timeout(WAIT_S):
                await r.worker.pipeline.quiet.wait()
            assert r.worker.blocks.held_count == 0
        ids = prompt(LENGTH, seed=9)
        assert (await r.generate(ids, PARAMS)).ids == local([ids], PARAMS)[0].ids


async def test_tickets_that_nobody_uses_free_their_pinned_prefixes() -> None:
    """Announced prefixes are held for a ticket, and no longer than it."""
    async with rig(decode=tiny_engine(pages=2 * POOL, deterministic=True), ticket_ttl_s=0.5) as r:
        ids = prompt(LENGTH, seed=1)
        await r.generate(ids, PARAMS)
        async with AsyncExitStack() as opened:
            calls = [await opened.enter_async_context(r.call(ids, PARAMS, request_id=str(n))) for n in range(3)]
            held = [(await call.admitted()).ticket.held_tokens for call in calls]
            assert held == [8, 8, 8] and r.worker.blocks.held_count == 2
            for call in calls:
                with pytest.raises(DeadlineExceeded) as caught:
                    await call.answer()
                assert caught.value.reason == "TICKET_EXPIRED"
            async with asyncio.timeout(WAIT_S):
                await r.worker.pipeline.quiet.wait()
            assert r.worker.blocks.held_count == 0
