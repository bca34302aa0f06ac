"""Every ratio of page sizes and both axis orders on both sides: bit-equal to one process.

The model has as many KV heads as the page of 4 has tokens, so an axis in the wrong place would
pass every check of a shape.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk
from tests.cache_transfer.engines import Pages, hand_over, prefill
from tests.engine.tiny import greedy, prompt, run, spec, tiny_engine

SIZES = (1, 3, 4, 7, 16, 64)
LAYOUTS = [(size, order) for size in SIZES for order in ("hnd", "nhd")]
SLOTS = 128
IDS = prompt(37, seed=2)
STEPS = 3
MODEL = spec(heads=4, kv_heads=4)


@cache
def made(size: int, order: str) -> tuple[Engine, Pages]:
    """An engine and scattered pages of it for 64 tokens."""
    engine = tiny_engine(MODEL, pages=SLOTS // size, page_size=size, axis_order=order, deterministic=True)
    needed = -(-64 // size)
    order_of = torch.randperm(SLOTS // size, generator=torch.Generator().manual_seed(size))[:needed]
    return engine, tuple(order_of.tolist())


@cache
def computed(size: int, order: str) -> Tensor:
    engine, pages = made(size, order)
    return prefill(engine, IDS, pages, chunk=16)


@cache
def baseline() -> tuple[list[int], list[Tensor]]:
    """One process, one chunk, pages of 5 tokens that no other case uses."""
    engine = tiny_engine(MODEL, pages=26, page_size=5, deterministic=True)
    ids, logits, _ = greedy(engine, IDS, tuple(range(26)), STEPS + 1)
    return ids, logits


@pytest.mark.parametrize(("size", "order"), LAYOUTS)
async def test_every_page_layout_takes_every_other(size: int, order: str) -> None:
    ids, expected = baseline()
    logits = computed(size, order)
    source, source_pages = made(size, order)
    for other_size, other_order in LAYOUTS:
        target = tiny_engine(MODEL, pages=SLOTS // other_size, page_size=other_size, axis_order=other_order,
                             deterministic=True)  # fmt: skip
        pages = made(other_size, other_order)[1]
        used = torch.arange(target.cache.capacity)
        target.cache.storage.index_fill_(
            target.cache._slot_axis, used, float("nan")
        )  # as an earlier owner may leave it
        # 16 tokens of 4 heads of 8 fp32 scalars: frames that end inside of pages
        _, taken = await hand_over(source, source_pages, target, pages, IDS, logits, frame_bytes=11 * 4 * 8 * 4)
        assert taken.logits is not None and taken.logits.data == expected[0].numpy().tobytes()
        for layer in range(MODEL.layers):
            for sent, kept in zip(source.cache.sequence(layer, source_pages, len(IDS)),
                                  target.cache.sequence(layer, pages, len(IDS)), strict=True):  # fmt: skip
                assert torch.equal(sent, kept), (other_size, other_order, layer)
        for step in range(STEPS):
            out = run(target, Chunk("r", (ids[step],), len(IDS) + step, pages))
            assert torch.equal(out.logits["r"][0], expected[step + 1]), (other_size, other_order, step)
