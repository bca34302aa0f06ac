"""Five thousand streams that are cancelled or run into their deadline: nothing of them stays.

Memory is compared between rounds, because heaps and caches need some until they are warm: what leaks
grows in every round, what is warm does not.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing

import psutil
import pytest

from pdserve.errors import DeadlineExceeded
from pdserve.request import SamplingParams
from tests.e2e.stack import Stack, pair
from tests.engine.tiny import prompt, tiny_engine

ENDLESS = SamplingParams(temperature=0, seed=0, max_tokens=200)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
ROUND, AT_ONCE, ROUNDS = 1000, 64, 5
LEAK = 16 << 10  # bytes that a request may leave; and one object


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """Each end is logged, and the test's own log would keep every record with its error."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


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


def memory() -> tuple[int, int]:
    """Resident bytes, and objects that Python tracks."""
    gc.collect()
    return int(psutil.Process().memory_info().rss), len(gc.get_objects())


async def grows(made: Stack) -> bool:
    """Whether one more round leaves something behind."""
    tasks, (resident, objects) = len(asyncio.all_tasks()), memory()
    ends = await give_up_on(made, ROUND)
    assert ends["cancelled"] == ROUND // 2 and ends["expired"] > ROUND // 4
    await made.until(lambda: len(asyncio.all_tasks()) <= tasks)
    now_resident, now_objects = memory()
    return now_resident - resident > ROUND * LEAK or now_objects - objects > ROUND


async def test_streams_that_are_given_up_leave_nothing() -> None:
    async with pair(tiny_engine(pages=128), tiny_engine(pages=128)) as made:
        grew = [await grows(made) for _ in range(ROUNDS)]
        assert not all(grew), f"memory grew in each of {ROUNDS} rounds"
        steps = made.decodes[0]._thread.steps
        answer = await made.ask(prompt(40), GREEDY)
        assert len(answer.ids) == GREEDY.max_tokens
        assert made.decodes[0]._thread.steps == steps + len(answer.ids), "and nothing else"
