"""Bits turned over between real workers, anywhere in the bytes of a connection: never a wrong token.

A damaged cache costs one attempt. Where damage goes on, the client gets a typed error and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.client.events import Tokens
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.request import SamplingParams
from tests.e2e.relay import Relay
from tests.e2e.stack import Stack, alone, stack
from tests.e2e.watched import engine
from tests.engine.tiny import prompt

LENGTH = 45
PARAMS = SamplingParams(temperature=0, max_tokens=5, seed=0)


@asynccontextmanager
async def relayed(prefills: int = 2) -> AsyncIterator[tuple[Stack, Relay]]:
    """Prefill workers that reach the one decode worker only through the relay."""
    relay = Relay()
    address = await relay.start()
    try:
        async with stack() as made:
            for _ in range(prefills):
                await made.add_prefill(engine())
            # All bytes pass the relay: none travel through shared memory.
            decode = await made.add_decode(engine(), advertise_transfer=address, shared_memory="off")
            relay.target = decode._transfer.address
            yield made, relay
    finally:
        await relay.stop()


@pytest.mark.parametrize("offset", range(0, 18_000, 1_500))
async def test_one_bit_anywhere_costs_an_attempt_at_most(offset: int) -> None:
    """Offsets from the first byte of a connection through opening, frames, logits and commit."""
    ids = prompt(LENGTH, seed=offset)
    async with relayed() as (made, relay):
        relay.arm(offset)
        got = await made.ask(ids, PARAMS)
        assert got.ids == alone(ids, PARAMS).ids
        assert got.record is not None and got.record.attempts <= 2
        assert relay.passed > offset and relay.flips == 1
        assert (await made.ask(ids, PARAMS)).ids == got.ids


async def test_a_bit_in_the_cache_itself_is_data_loss_and_the_request_moves_on() -> None:
    """On a connection in use, in the middle of the frames: the receiver says what it was."""
    async with relayed() as (made, relay):
        for seed in range(2):  # both prefill workers are connected, and no prefix is found later
            await asyncio.gather(*(made.ask(prompt(LENGTH, seed=10 * seed + n), PARAMS) for n in range(4)))
        lost = 0
        for seed in range(6):
            ids = prompt(LENGTH, seed=100 + seed)
            relay.arm(4_000 + 1_500 * seed)
            got = await made.ask(ids, PARAMS)
            assert got.ids == alone(ids, PARAMS).ids
            assert got.record is not None and relay.flips == 1
            lost += any("FRAME_DIGEST" in note or "did not verify" in note for note in got.record.notes)
            assert got.record.attempts == 2
        assert lost >= 4


async def test_damage_that_goes_on_is_a_typed_error_and_never_text() -> None:
    ids = prompt(LENGTH, seed=7)
    async with relayed() as (made, relay):
        relay.arm(2_000, every=1_000)
        seen = []
        with pytest.raises(PdserveError) as caught:
            async for event in made.client.generate(token_ids=ids, sampling=PARAMS, timeout_s=30.0):
                seen.append(event)
        # Which one depends on what the bit was part of; never that the client asked for something wrong.
        assert caught.value.reason not in ("", "INTERNAL") and not isinstance(caught.value, InvalidRequest)
        assert not any(isinstance(event, Tokens) for event in seen)
        assert relay.flips >= 2  # every pair was tried once
        await made.check_free()
        relay.arm(None)
        assert (await made.ask(ids, PARAMS)).ids == alone(ids, PARAMS).ids
