"""Layers that cache differently, or nothing, handed over between workers of other pages and axis orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdserve.request import SamplingParams
from tests.cache_transfer.engines import hand_over, prefill
from tests.e2e.stack import alone, stack
from tests.engine.test_layer_shapes import MIXED, UNLIKE
from tests.engine.tiny import prompt, spec, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=5, seed=0, ignore_eos=True)
IDS = prompt(23, seed=4)
MODEL = spec(**UNLIKE)
ROW_BYTES = sum(2 * shape.kv_heads * shape.head_dim * 4 for shape in MIXED)  # fp32


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_the_answer_is_that_of_one_process(shared_memory: str) -> None:
    layout: dict[str, Any] = {"deterministic": True, "pages": 64}
    there, here = (
        tiny_engine(MODEL, page_size=size, axis_order=order, **layout) for size, order in ((4, "hnd"), (3, "nhd"))
    )
    expected = alone(IDS, GREEDY, of=MODEL)
    async with stack() as made:
        await made.add_prefill(there, shared_memory=shared_memory)
        await made.add_decode(here, shared_memory=shared_memory)
        answer = await made.ask(IDS, GREEDY)
        first = np.frombuffer(made.first_logits(answer), np.uint8).tobytes()
    assert answer.ids == expected.ids and first == expected.first_logits
    assert answer.record is not None and answer.record.bytes_sent >= len(IDS) * ROW_BYTES


@pytest.mark.parametrize("frame_bytes", [64, 200, 1 << 20])  # a head of one token; several of one head; whole layers
async def test_any_cut_of_heads_and_tokens_fills_the_pages(frame_bytes: int) -> None:
    source, target = tiny_engine(MODEL, page_size=4), tiny_engine(MODEL, page_size=5, axis_order="nhd")
    pages, other = (9, 3, 12, 0, 7, 30), (4, 1, 8, 0, 2)
    logits = prefill(source, IDS, pages)
    report, _ = await hand_over(source, pages, target, other, IDS, logits, frame_bytes=frame_bytes)
    assert report.payload_bytes == len(IDS) * ROW_BYTES
    for layer in range(MODEL.layers):
        sent, kept = source.cache.sequence(layer, pages, len(IDS)), target.cache.sequence(layer, other, len(IDS))
        assert all(bool((a == b).all()) for a, b in zip(sent, kept, strict=True)), layer
