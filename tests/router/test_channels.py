"""Channels of workers that have left the pool are closed, but not under a call."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from pdserve.registry.records import PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.events import Accepted
from router.channels import WorkerChannels
from router.request import Ask, TokenPrompt
from tests.engine.tiny import prompt
from tests.router.peers import BadPrefill, serving
from tests.router.support import VOCAB, finish_of, house

IDS = prompt(20, seed=4, vocab=VOCAB)


async def test_an_address_that_left_is_closed_once_nobody_calls_it() -> None:
    channels = WorkerChannels()
    try:
        await channels.keep_only({"127.0.0.1:1", "127.0.0.1:2"})
        channels.get("127.0.0.1:3")  # never a worker's
        idle = channels.get("127.0.0.1:2")
        with channels.use("127.0.0.1:1") as busy, channels.use("127.0.0.1:1") as same:
            assert same is busy
            await channels.keep_only(set())
            assert channels.get("127.0.0.1:1") is busy
            assert channels.get("127.0.0.1:2") is not idle
        await channels.keep_only(set())
        assert channels.get("127.0.0.1:1") is not busy
        assert "127.0.0.1:3" in channels._channels
    finally:
        await channels.close()


async def test_workers_that_come_and_go_leave_no_channels() -> None:
    async with house(decodes=0) as made:
        for number in range(3):
            await made.add_decode(f"d{number}")
            assert finish_of(await made.generate(IDS, max_tokens=3, ignore_eos=True)).reason == "length"
            await made.decodes.pop().stop()
            await made.router.pool.refresh()
        assert set(made.router.channels._channels) == {made.prefills[0].address}


async def test_a_worker_that_leaves_in_the_middle_keeps_its_channel_until_its_calls_are_over() -> None:
    peer = BadPrefill()
    async with house(prefills=0) as made, serving(peer) as address:
        await made.add_ghost("leaving", PREFILL, address)
        params = SamplingParams(temperature=0.0, max_tokens=5)
        request = await made.router.intake.take(Ask(TokenPrompt(IDS), params))
        async with aclosing(made.router.orchestrator.generate(request)) as events:
            assert isinstance(await anext(events), Accepted)
            async with asyncio.timeout(5):
                await peer.called.wait()
            await made.remove_ghost("leaving")
            assert address in made.router.channels._channels
            assert not peer.cancelled.is_set()
        await made.router.pool.refresh()
        assert address not in made.router.channels._channels
