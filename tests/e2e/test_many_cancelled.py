"""Thousands of streams that are cancelled or run into their deadline: nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import aclosing

import psutil
import pytest

from pdserve.errors import DeadlineExceeded
from pdserve.request import SamplingParams
from tests.e2e.stack import Stack, pair
from tests.engine.tiny import prompt, tiny_engine

ENDLESS = SamplingParams(temperature=0, seed=0, max_tokens=200)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
COUNT, AT_ONCE = 2000, 64
WARM_UP = 300
GROWTH = 24 << 20  # bytes: 12 kB per request would be too much


async def give_up(made: Stack, number: int) -> str:
    """Every other one is cancelled after one or two events, the rest have 1 to 31 ms."""
    ids = prompt(9 + number % 5, seed=number % 7)
    if number % 2:
        async with aclosing(made.client.generate(token_ids=ids, sampling=ENDLESS, timeout_s=60.0)) as events:
            for _ in range(1 + number % 4 // 2):
                await anext(events)
        return "cancelled"
    try:
        await made.ask(ids, ENDLESS, timeout_s=0.001 + 0.002 * (number % 16))
    except DeadlineExceeded:
        return "expired"
    return "answered"


async def give_up_on(made: Stack, count: int) -> Counter[str]:
    numbers, ends = iter(range(count)), Counter[str]()

    async def one_after_the_other() -> None:
        for number in numbers:
            ends[await give_up(made, number)] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    await made.check_free()
    return ends


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
async def test_thousands() -> None:
    async with pair(tiny_engine(pages=128), tiny_engine(pages=128)) as made:
        await give_up_on(made, WARM_UP)
        tasks, before = len(asyncio.all_tasks()), memory()
        ends = await give_up_on(made, COUNT)
        assert ends["cancelled"] == COUNT // 2 and ends["expired"] > COUNT // 4
        await made.until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert memory() - before < GROWTH
        steps = made.decodes[0]._thread.steps
        answer = await made.ask(prompt(40), GREEDY)
        assert len(answer.ids) == GREEDY.max_tokens
        assert made.decodes[0]._thread.steps == steps + len(answer.ids), "and nothing else"
