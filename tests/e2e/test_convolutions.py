"""A model with short convolutions through the whole service: its pages are shared, copied and moved like any others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.e2e.stack import Stack, alone, pair
from tests.engine.test_layer_shapes import CONVOLUTIONS
from tests.engine.tiny import prompt, spec, tiny_engine

MODEL = spec(**CONVOLUTIONS)
IDS = prompt(45, seed=2)  # eleven pages of four, and one token
GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0, ignore_eos=True)
DRAWN = SamplingParams(seed=21, max_tokens=12, temperature=1.1)


def service(size: int = 3, order: str = "nhd") -> AbstractAsyncContextManager[Stack]:
    prefill = tiny_engine(MODEL, pages=128, page_size=4, deterministic=True)
    return pair(prefill, tiny_engine(MODEL, pages=128, page_size=size, axis_order=order, deterministic=True))


async def ask(made: Stack, ids: Sequence[int]) -> int:
    """Prompt tokens found in the cache; the answer is that of one process, bit for bit."""
    answer, expected = await made.ask(ids, GREEDY), alone(ids, GREEDY, of=MODEL)
    assert answer.ids == expected.ids and made.first_logits(answer) == expected.first_logits
    return answer.usage.cached_prompt_tokens


async def test_a_prefix_that_both_workers_hold_is_computed_once_and_travels_once() -> None:
    async with service() as made:
        assert await ask(made, IDS[:26]) == 0
        assert await ask(made, IDS) == 24  # whole pages of four
        assert await ask(made, (*IDS[:31], 5, 6, 7)) == 28


@pytest.mark.parametrize("n", [3])
async def test_choices_share_the_prompts_pages_and_copy_the_one_they_write_in(n: int) -> None:
    async with service(size=4, order="hnd") as made:
        answer = await made.ask(IDS, DRAWN, n=n)
    runner = LocalRunner(tiny_engine(MODEL, deterministic=True, pages=256), chunk_tokens=7)
    outputs: list[tuple[int, ...]] = [()] * n
    for event in runner.generate(IDS, DRAWN, n=n):
        outputs[event.choice] += getattr(event, "ids", ())
    assert [choice.ids for choice in answer.choices] == outputs and len(set(outputs)) == n
    assert answer.record is not None and (answer.record.transfers, answer.record.copied_pages) == (1, n - 1)
