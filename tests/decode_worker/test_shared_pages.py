"""Two requests for the same prompt that share pages, of which one's cache arrives damaged at each place in turn.

The damaged one fails or, tried again, answers as one process does; the other always does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cache_transfer.messages import PackedFrames, Unpacked
from cache_transfer.transport import GrpcTransport
from cache_transfer.wire import contract_to_proto
from pdserve.errors import DataLoss
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.v1 import decode_pb2
from tests.cache_transfer.by_hand import damaged
from tests.decode_worker.rig import Call, Rig, local, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
IDS = prompt(23, seed=8)
FRAMES = 6 * 4  # three layers, K and V, frames of two of the seven tokens that travel
FRAME_BYTES = 2 * 2 * 8 * 4


class Damaging(GrpcTransport):
    """Turns over one bit of one frame's payload after it was hashed."""

    def __init__(self, link: object, at: int) -> None:
        super().__init__(link)  # type: ignore[arg-type]
        self._left = at

    def pack(self, frames: Sequence[Unpacked], secret: bytes) -> PackedFrames:
        packed = super().pack(frames, secret)
        at, self._left = self._left, self._left - len(frames)
        return damaged(packed, at) if 0 <= at < len(frames) else packed


async def retry(call: Call) -> None:
    await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(call.rig.prefill.contract)))


async def two_at_once(r: Rig, at: int, expected: tuple[int, ...]) -> int:
    """One round; returns the tokens that both found here already."""
    computed = r.prefill.compute(IDS)
    async with r.call(IDS, PARAMS, request_id="a") as a, r.call(IDS, PARAMS, request_id="b") as b:
        damaged, whole = await a.admitted(), await b.admitted()
        held = damaged.ticket.held_tokens
        assert held == whole.ticket.held_tokens
        async with channel(r.worker.transfer_address) as link:
            failing = r.push(damaged, computed, transport=Damaging(link, at), max_payload_bytes=FRAME_BYTES)
            lost, _ = await asyncio.gather(
                failing, r.push(whole, computed, max_payload_bytes=FRAME_BYTES), return_exceptions=True
            )
        assert isinstance(lost, DataLoss) and lost.reason == "FRAME_DIGEST"
        assert (await b.answer()).ids == expected
        await retry(a)
        await r.push(damaged, computed, ticket=await a.ticket())
        assert (await a.answer()).ids == expected
    return held


@pytest.mark.parametrize("at", range(0, FRAMES, 3))
async def test_damage_to_one_of_two_that_share_pages_never_reaches_the_other(at: int) -> None:
    (expected,) = (each.ids for each in local([IDS], PARAMS))
    async with rig(decode=tiny_engine(deterministic=True, pages=64)) as r:
        # The first 16 tokens are here and will be shared: pages of a verified request.
        (warm,) = (each.ids for each in local([IDS[:17]], PARAMS))
        assert (await r.generate(IDS[:17], PARAMS)).ids == warm
        assert await two_at_once(r, at, expected) == 16
        # Damaged pages never entered the index: whoever finds the prompt now finds the right one.
        assert (await r.generate(IDS, PARAMS)).ids == expected


async def test_damage_without_shared_pages_leaves_nothing_to_be_found() -> None:
    """Cold, both at once: nothing of the failed one is found by a third, and its pages are free."""
    (expected,) = (each.ids for each in local([IDS], PARAMS))
    async with rig(decode=tiny_engine(deterministic=True, pages=64)) as r:
        computed = r.prefill.compute(IDS)
        async with r.call(IDS, PARAMS) as call, channel(r.worker.transfer_address) as link:
            admitted = await call.admitted()
            with pytest.raises(DataLoss):
                await r.push(admitted, computed, transport=Damaging(link, 3))
            await r.describe_until(lambda: r.worker.blocks.held_count == 0)
        async with r.call(IDS, PARAMS) as call:
            admitted = await call.admitted()
            assert admitted.ticket.held_tokens == 0
            await r.push(admitted, computed)
            assert (await call.answer()).ids == expected
