"""Every value of every dtype arrives bit for bit from one engine's pages in another's; bytes are numel * itemsize.

NaNs with payloads, both zeros, subnormals, infinities, and numbers that a narrower dtype could not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_transfer.pages import Range
from pdserve.engine.dtypes import torch_dtype
from tests.cache_transfer.engines import hand_over
from tests.cache_transfer.pages import NumpySource
from tests.cache_transfer.support import check_same, make_pair, random_cache
from tests.engine.tiny import prompt, spec, tiny_engine

TOKENS = 21
MODEL = spec(heads=4, kv_heads=4)
BITS = {"fp32": torch.int32, "fp16": torch.int16, "bf16": torch.int16, "float64": torch.int64}
LARGE = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.38e38, "float64": 1.7e308}


def every_kind(dtype: str, count: int) -> Tensor:
    """Random bits, which hold every kind of NaN, with the named values among them."""
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8, generator=generator)
    values = bits.view(kind).clone()
    smallest = torch.ones(1, dtype=BITS[dtype]).view(kind)
    named = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65505.0, 1e5, -70000.0, LARGE[dtype], -LARGE[dtype]]
    values[: len(named)] = torch.tensor(named, dtype=torch.float64).to(kind)
    values[len(named)], values[len(named) + 1] = smallest[0], -smallest[0]
    return values


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("orders", [("hnd", "nhd"), ("nhd", "hnd")])
async def test_pages_of_every_dtype_arrive_bit_for_bit(dtype: str, orders: tuple[str, str]) -> None:
    source, target = (
        tiny_engine(MODEL, dtype=dtype, pages=16, page_size=size, axis_order=order)
        for size, order in zip((4, 7), orders, strict=True)
    )
    pages, other = (5, 1, 2, 9, 14, 3), (8, 0, 11)
    slots = torch.tensor(source.cache.slots((0, TOKENS), pages))
    for layer in range(MODEL.layers):
        values = every_kind(dtype, 2 * TOKENS * 4 * 8).view(2, TOKENS, 4, 8)
        source.cache.write(layer, slots, values[0], values[1])
    logits = torch.zeros(MODEL.vocab_size, dtype=torch.float64 if dtype == "float64" else torch.float32)
    report, taken = await hand_over(source, pages, target, other, prompt(TOKENS), logits, frame_bytes=1000)
    itemsize = torch_dtype(dtype).itemsize
    assert report.payload_bytes == MODEL.layers * 2 * TOKENS * 4 * 8 * itemsize
    assert taken.logits is not None and report.sent_tokens == TOKENS
    for layer in range(MODEL.layers):
        sent, kept = source.cache.sequence(layer, pages, TOKENS), target.cache.sequence(layer, other, TOKENS)
        for left, right in zip(sent, kept, strict=True):
            assert torch.equal(left.contiguous().view(BITS[dtype]), right.contiguous().view(BITS[dtype]))


class Strided(NumpySource):
    """Gives every token's heads as a view with gaps: every second row of a larger array."""

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        pieces = []
        for token in range(*tokens):
            rows = self.view(plane, layer, token)[slice(*heads)]
            wide = np.full((2 * rows.shape[0], rows.shape[1]), 0xAA, np.uint8)
            wide[::2] = rows
            pieces.append(wide[::2].data)
        assert not pieces[0].c_contiguous
        return pieces


@pytest.mark.parametrize("kind", ["grpc", "memory", "shared"])
@pytest.mark.parametrize("dtype", BITS)
async def test_views_with_gaps_are_sent_without_them(kind: str, dtype: str) -> None:
    async with make_pair(kind, dtype=dtype) as pair:
        ticket, identity = pair.issue(13)
        cache = random_cache(pair.sends, 13)
        sender = pair.sender(ticket, identity, Strided(pair.sends, 13).fill(cache))
        pair.announce_all(sender, 13)
        report = await sender.run()
        assert report.payload_bytes == sum(each.nbytes for each in cache.values())
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(13), cache)
