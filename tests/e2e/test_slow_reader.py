"""Pages that are still being read for the wire while other prompts want them: never given away, never a hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdserve.engine.cache import PagedCache, Rows
from pdserve.errors import DeadlineExceeded
from pdserve.request import SamplingParams
from tests.e2e.stack import Stack, alone, pair, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=4, seed=0)
SLOW = prompt(24, seed=3)  # half of the prefill worker's pages


class SlowReader:
    """Holds the first thread that reads this cache for the wire, before it has read anything."""

    def __init__(self, cache: PagedCache) -> None:
        self.reading = threading.Event()
        self._gate = threading.Event()
        self._first = threading.Lock()
        self._read = cache.read_rows
        cache.read_rows = self  # type: ignore[method-assign]

    def __call__(self, plane: str, layer: int, rows: Rows, out: memoryview) -> None:
        if self._first.acquire(blocking=False):
            self.reading.set()
            assert self._gate.wait(2 * WAIT_S)
        self._read(plane, layer, rows, out)

    @contextmanager
    def released(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._gate.set()


def traffic(made: Stack) -> list[asyncio.Task[Any]]:
    """Prompts that together need the pool several times over, and so evict whatever may be evicted."""
    return [asyncio.create_task(made.ask(prompt(20, seed=50 + number), PARAMS)) for number in range(6)]


async def test_pages_under_a_slow_reader_are_not_evicted() -> None:
    async with pair(engine(pages=12), engine()) as made:
        prefill = made.prefills[0]
        reader = SlowReader(prefill.engine.cache)
        with reader.released():
            slow = asyncio.create_task(made.ask(SLOW, PARAMS))
            assert await asyncio.to_thread(reader.reading.wait, WAIT_S)
            async with asyncio.timeout(2 * WAIT_S):
                others = await asyncio.gather(*traffic(made))
            assert not slow.done()
            assert prefill.blocks.held_count == 6  # the slow one's, all through
        async with asyncio.timeout(WAIT_S):
            got = await slow
        assert got.ids == alone(SLOW, PARAMS).ids
        assert made.first_logits(got) == alone(SLOW, PARAMS).first_logits
        for number, other in enumerate(others):
            assert other.ids == alone(prompt(20, seed=50 + number), PARAMS).ids


async def test_pages_whose_lease_ended_under_a_slow_reader_wait_for_it() -> None:
    """The request is lost, but nobody may write what a thread still reads; when it is done all ends at once."""
    async with stack() as made:
        prefill = await made.add_prefill(engine(pages=12), lease_s=0.5)
        await made.add_decode(engine())
        reader = SlowReader(prefill.engine.cache)
        with reader.released():
            slow = asyncio.create_task(made.ask(SLOW, PARAMS))
            assert await asyncio.to_thread(reader.reading.wait, WAIT_S)
            (job,) = prefill.pipeline.jobs.values()
            await made.until(lambda: job.ending is not None)
            for each in traffic(made):
                async with asyncio.timeout(WAIT_S):
                    await each
            assert prefill.blocks.held_count == 6 and not slow.done()
        with pytest.raises(DeadlineExceeded) as caught:
            async with asyncio.timeout(WAIT_S):
                await slow
        assert caught.value.reason == "LEASE_ENDED"
        await made.check_free()
        assert (await made.ask(SLOW, PARAMS)).ids == alone(SLOW, PARAMS).ids
