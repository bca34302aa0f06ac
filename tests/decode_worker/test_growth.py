"""Sequences that lack a page to grow: what they wait for, and what ends for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decode_worker.sequence import Sequence, State
from pdserve.errors import DeadlineExceeded
from tests.decode_worker.rig import Rig, rig
from tests.decode_worker.test_preemption import GREEDY, undisturbed
from tests.engine.tiny import prompt, tiny_engine


async def stuck(r: Rig, key: str) -> Sequence:
    """Waits until a sequence cannot grow and no step runs."""
    [sequence] = [s for s in r.worker.pipeline.scheduler.running if s.key.startswith(key)]
    await r.describe_until(lambda: r.worker.pipeline.scheduler._memory.stuck and not sequence.stepping)
    assert r.worker.blocks.available_count == 0 and sequence.pages
    return sequence


async def test_growth_waits_for_a_cache_in_transfer_and_goes_on_when_that_breaks_off() -> None:
    params = replace(GREEDY, max_tokens=22)
    async with rig(decode=tiny_engine(deterministic=True, pages=8), growth_watermark=0.0) as r:
        async with (
            r.call(prompt(9), params, request_id="a") as call,
            r.call(prompt(14, seed=1), replace(GREEDY, max_tokens=9)) as other,
        ):
            sender = r.sender(await other.admitted(), r.prefill.compute(other.ids), layers=1)
            pushing = asyncio.create_task(sender.run())
            await r.states.wait(State.RECEIVING)
            await r.push(await call.admitted(), r.prefill.compute(call.ids))
            await r.states.wait(State.DECODING)
            await stuck(r, "a")
            pushing.cancel()
            await asyncio.wait({pushing})
            assert (await call.answer()).ids == undisturbed([prompt(9)], params)[0].ids
        assert r.worker.pipeline.scheduler.counters.preemptions == 0


async def test_pins_that_keep_one_from_growing_end_with_their_requests_or_tickets() -> None:
    """One of two pinned prefixes is used, while the sequence that it stood in the way of waits; the other expires."""
    params = replace(GREEDY, max_tokens=24)
    async with rig(decode=tiny_engine(deterministic=True, pages=8), growth_watermark=0.0, ticket_ttl_s=1.5) as r:
        await r.generate(prompt(5), replace(GREEDY, max_tokens=3))
        async with (
            r.call((*prompt(5), 1), replace(GREEDY, max_tokens=9)) as used,
            r.call((*prompt(5), 2), replace(GREEDY, max_tokens=9)) as unused,
            r.call(prompt(9, seed=1), params, request_id="a") as call,
        ):
            pushed = await used.admitted()
            assert [pushed.ticket.held_tokens, (await unused.admitted()).ticket.held_tokens] == [4, 4]
            await r.push(await call.admitted(), r.prefill.compute(call.ids))
            await r.states.wait(State.PREEMPTED)
            async with r.call((*prompt(5), 3), replace(GREEDY, max_tokens=4)) as late:
                assert (await late.admitted()).ticket.held_tokens == 0  # no pin is added meanwhile
            await r.push(pushed, r.prefill.compute(used.ids))
            assert (await used.answer()).ids == undisturbed([used.ids], replace(GREEDY, max_tokens=9))[0].ids
            assert (await call.answer()).ids == undisturbed([call.ids], params)[0].ids
            with pytest.raises(DeadlineExceeded):
                await unused.answer()
