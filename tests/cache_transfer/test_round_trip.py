"""Caches arrive bit for bit, over both transports, between pages of different shape."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import replace

import numpy as np
import pytest

from cache_transfer.allocator import keep_freed_frames
from cache_transfer.codec import ITEM_BYTES
from cache_transfer.intake import FrameMessage, Intake
from cache_transfer.messages import Frame, Grant, Queued
from cache_transfer.opening import make_opening
from tests.cache_transfer.pages import WAIT_S, DirectNumpySource, GatedSource, NumpySource
from tests.cache_transfer.support import (
    check_same,
    logits_of,
    make_contract,
    make_pair,
    random_cache,
)

both_transports = pytest.mark.parametrize("kind", ["grpc", "memory", "shared"])


@both_transports
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "float64"])
async def test_every_bit_pattern_arrives(kind: str, dtype: str) -> None:
    async with make_pair(kind, dtype=dtype) as pair:
        ticket, identity = pair.issue(13)
        cache = random_cache(pair.sends, 13)
        cache["k", 0].reshape(-1)[: 4 * 8] = special_values(dtype)
        sender = pair.sender(ticket, identity, NumpySource(pair.sends, 13).fill(cache))
        pair.announce_all(sender, 13)
        report = await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(13), cache)
        claim, logits, received = pair.host.done[0]
        size = 13 * 3 * 4 * ITEM_BYTES[dtype]
        assert (report.frames, report.payload_bytes, report.sent_tokens) == (6, 6 * size, 13)
        assert (received.frames, received.payload_bytes) == (6, 6 * size)
        assert (logits.dtype, logits.data) == logits_of(pair.sends)
        assert logits.position == 12
        assert {d.code for d in claim.conversions} == {"PAGE_SIZE", "PAGE_AXIS_ORDER"}
        assert pair.host.failed == []


def special_values(dtype: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """NaN with payload, -0.0, the smallest subnormal, infinity: 32 bytes of them."""
    bits: dict[str, tuple[str, list[int]]] = {
        "fp32": ("<u4", [0x7FC0_1234, 0x8000_0000, 0x0000_0001, 0xFF80_0000] * 2),
        "fp16": ("<u2", [0x7E01, 0x8000, 0x0001, 0xFC00] * 4),
        "bf16": ("<u2", [0x7FC1, 0x8000, 0x0001, 0xFF80] * 4),
        "float64": ("<u8", [0x7FF8_0000_0000_1234, 1 << 63, 1, 0xFFF0 << 48]),
    }
    kind, values = bits[dtype]
    return np.array(values, kind).view(np.uint8)


@both_transports
@pytest.mark.parametrize("max_payload_bytes", [16, 100, 400])
async def test_small_frames_split_heads_and_tokens(kind: str, max_payload_bytes: int) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(10)
        sender = pair.sender(ticket, identity, pair.source(10), max_payload_bytes=max_payload_bytes)
        pair.announce_all(sender, 10)
        report = await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(10), random_cache(pair.sends, 10))
        # rows of 16 bytes, three heads: one head and token; two heads and one head; or whole tokens
        assert report.frames == 6 * {16: 30, 100: 5, 400: 2}[max_payload_bytes]


@both_transports
async def test_layers_stream_before_and_after_the_grant(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.may_grant.clear()
        ticket, identity = pair.issue(12)
        sender = pair.sender(ticket, identity, pair.source(12))
        running = asyncio.create_task(sender.run())
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
        for layer in range(3):
            await asyncio.to_thread(sender.computed, layer, (0, 5))
        pair.host.may_grant.set()
        for layer in range(3):
            sender.computed(layer, (9, 12))  # out of order: waits for the gap to close
        for layer in (2, 0, 1):
            sender.computed(layer, (5, 9))
        sender.logits(*logits_of(pair.sends), 11)
        async with asyncio.timeout(WAIT_S):
            await running
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(12), random_cache(pair.sends, 12))
        pair.check_nothing_left()


@both_transports
async def test_frames_are_written_while_later_layers_are_computed(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.gated = True
        ticket, identity = pair.issue(6)
        sender = pair.sender(ticket, identity, pair.source(6))
        running = asyncio.create_task(sender.run())
        sender.computed(0, (0, 6))
        assert await asyncio.to_thread(pair.host.writing.wait, WAIT_S)
        pair.host.gate.set()
        sender.computed(1, (0, 6))
        sender.computed(2, (0, 6))
        sender.logits(*logits_of(pair.sends), 5)
        async with asyncio.timeout(WAIT_S):
            await running
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(6), random_cache(pair.sends, 6))


@both_transports
async def test_a_held_prefix_does_not_travel(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(13, start=7)
        sender = pair.sender(ticket, identity, pair.source(13))
        pair.announce_all(sender, 13)
        report = await sender.run()
        assert report.sent_tokens == 6
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(13), random_cache(pair.sends, 13), start=7)


@both_transports
async def test_one_token_needs_only_logits(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(13, logits_only=True)
        sender = pair.sender(ticket, identity, pair.source(13), logits_only=True)
        pair.announce_all(sender, 13)
        report = await sender.run()
        assert (report.frames, report.payload_bytes, report.sent_tokens) == (0, 0, 0)
        assert pair.host.sinks[ticket.handoff_id, 1].writes == 0
        assert pair.host.done[0][1].data == logits_of(pair.sends)[1]


@both_transports
async def test_many_handoffs_share_one_receiver(kind: str) -> None:
    async with make_pair(kind, layers=4) as pair:
        runs = []
        for number in range(6):
            ticket, identity = pair.issue(20 + number)
            sender = pair.sender(ticket, identity, pair.source(20 + number, seed=number), max_payload_bytes=200)
            pair.announce_all(sender, 20 + number)
            runs.append((ticket, number, asyncio.create_task(sender.run())))
        for ticket, number, run in runs:
            async with asyncio.timeout(WAIT_S):
                await run
            content = pair.host.sinks[ticket.handoff_id, 1].content(20 + number)
            check_same(content, random_cache(pair.sends, 20 + number, seed=number))
        assert len(pair.host.done) == 6
        pair.check_nothing_left()


async def test_the_grant_names_what_is_wanted() -> None:
    async with make_pair("memory") as pair:
        ticket, identity = pair.issue(13, start=7)
        stream = pair.transport.open(WAIT_S)
        await stream.send(make_opening(ticket, identity, pair.sends, logits_only=False))
        assert await stream.receive() == Grant(7, 13, 1 << 20, max_frames=64)
        await stream.close()


@pytest.mark.parametrize(("granted", "expected"), [(0, {1}), (1, {1}), (4, {2, 4})])
async def test_frames_come_together_as_far_as_the_grant_allows(
    granted: int, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing granted is what a receiver says that does not know of it."""
    monkeypatch.setattr("cache_transfer.intake.MAX_FRAMES", granted)
    sizes: set[int] = set()
    take = Intake.take

    async def counted(self: Intake, message: FrameMessage) -> None:
        assert not isinstance(message, Queued)
        sizes.add(1 if isinstance(message, Frame) else len(message.frames))
        await take(self, message)

    monkeypatch.setattr(Intake, "take", counted)
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(9)
        sender = pair.sender(ticket, identity, pair.source(9))
        pair.announce_all(sender, 9)  # six frames: K and V of three layers
        await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(9), random_cache(pair.sends, 9))
    assert sizes == expected


async def test_planes_of_unlike_shape() -> None:
    base = make_contract()
    first, second = base.planes[0]
    odd = replace(base, planes=((first, replace(second, heads=1, head_dim=10)), *base.planes[1:]))
    async with make_pair("grpc", sends=odd) as pair:
        ticket, identity = pair.issue(9)
        sender = pair.sender(ticket, identity, pair.source(9), max_payload_bytes=64)
        pair.announce_all(sender, 9)
        await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(9), random_cache(odd, 9))


async def test_the_source_is_not_read_after_run_ended() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(9)
        source = GatedSource(pair.source(9))
        sender = pair.sender(ticket, identity, source)
        pair.announce_all(sender, 9)
        running = asyncio.create_task(sender.run())
        assert await asyncio.to_thread(source.reading.wait, WAIT_S)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()  # a thread still reads the pages
        source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert source.busy == 0
        async with asyncio.timeout(WAIT_S):
            await pair.host.over.wait()
        await pair.check_next_handoff_works()


@both_transports
async def test_a_source_may_write_frames_in_place(kind: str) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(10)
        source = DirectNumpySource(pair.sends, 10).fill(random_cache(pair.sends, 10))
        sender = pair.sender(ticket, identity, source, max_payload_bytes=100)
        pair.announce_all(sender, 10)
        await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(10), random_cache(pair.sends, 10))


def test_freed_frames_are_kept() -> None:
    """Once for the process; a second call changes nothing. False only where there is no mallopt."""
    assert keep_freed_frames() is hasattr(ctypes.CDLL(None), "mallopt")
    assert keep_freed_frames() is keep_freed_frames()
