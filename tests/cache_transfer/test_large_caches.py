"""Caches around and far above what one message may hold: cut into frames, in bounded memory.

One layer is one range of the source, far larger than a frame and than gRPC's own limit of 4 MiB.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest

from cache_transfer.messages import MAX_PAYLOAD_BYTES
from cache_transfer.pages import PageSink, Range
from cache_transfer.tickets import Claim
from tests.cache_transfer.pages import WAIT_S, Array
from tests.cache_transfer.support import Host, Pair, make_contract, make_pair

MIB = 1 << 20
HEADS, HEAD_DIM = 8, 32  # 1 KiB for a token in a plane
ROW = HEADS * HEAD_DIM * 4
IN_FLIGHT = 40 * MIB  # batches being packed, sent, received, written; gRPC's own buffers are not Python's


@dataclass
class Flat:
    """One array per plane, as source and as sink; counts the largest payload."""

    tokens: int
    planes: dict[str, Array] = field(default_factory=dict)
    largest: int = 0

    def __post_init__(self) -> None:
        for number, plane in enumerate("kv"):
            rows = np.arange(self.tokens, dtype=np.uint32) * 2 + number
            self.planes[plane] = np.repeat(rows[:, None], ROW // 4, 1).view(np.uint8).reshape(self.tokens, HEADS, -1)

    def read_into(self, plane: str, layer: int, heads: Range, tokens: Range, out: memoryview) -> None:
        rows = self.planes[plane][slice(*tokens), slice(*heads)]
        np.frombuffer(out, np.uint8).reshape(rows.shape)[:] = rows

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> list[memoryview]:
        raise AssertionError("read_into was there")

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self.largest = max(self.largest, len(payload))
        rows = self.planes[plane][slice(*tokens), slice(*heads)]
        rows[:] = np.frombuffer(payload, np.uint8).reshape(rows.shape)


class FlatHost(Host):
    flat: Flat

    async def grant(self, claim: Claim) -> PageSink:
        self.flat = Flat(claim.end)
        for plane in self.flat.planes.values():
            plane[:] = 0xEE
        return self.flat


async def push(pair: Pair, tokens: int) -> tuple[int, int]:
    """Frames sent, and the most that Python held at a time beyond the two caches."""
    host = FlatHost(pair.takes)
    pair.receiver._host = host
    ticket, identity = pair.issue(tokens)
    source = Flat(tokens)
    sender = pair.sender(ticket, identity, source, deadline_s=6 * WAIT_S)
    pair.announce_all(sender, tokens)
    tracemalloc.start()
    try:
        async with asyncio.timeout(6 * WAIT_S):
            report = await sender.run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.payload_bytes == 2 * tokens * ROW and len(host.done) == 1
    for plane, rows in source.planes.items():
        assert np.array_equal(host.flat.planes[plane], rows)
    assert host.flat.largest <= MAX_PAYLOAD_BYTES
    return report.frames, peak - report.payload_bytes  # the sink's own pages are allocated meanwhile


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize("mib", [3.9, 4.1, 64])
async def test_a_cache_of_any_size_passes_in_frames(kind: str, mib: float) -> None:
    tokens = round(mib * MIB / (2 * ROW))
    contract = make_contract(layers=1, heads=HEADS, head_dim=HEAD_DIM)
    async with make_pair(kind, sends=contract) as pair:
        frames, extra = await push(pair, tokens)
        assert frames == 2 * -(-tokens * ROW // MAX_PAYLOAD_BYTES)
        assert extra < IN_FLIGHT
