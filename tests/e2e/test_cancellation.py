"""A client that goes away, at every stage of its request: the work stops and every page comes back at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from cache_transfer.pages import PageSink
from cache_transfer.receiver import ReceiverHost
from cache_transfer.tickets import Claim
from pdserve.client.events import Event
from pdserve.errors import DeadlineExceeded
from pdserve.request import SamplingParams
from tests.e2e.stack import FREE_S, MODEL, Stack, alone, pair, stack, streaming
from tests.e2e.watched import WAIT_S, WatchedEngine, WatchedHost, engine
from tests.engine.tiny import TINY, prompt
from tests.prefill_worker.decode_side import GatedSink
from tests.router.support import bundle, model

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
ENDLESS = replace(GREEDY, max_tokens=400)


@asynccontextmanager
async def asking(made: Stack, ids: Sequence[int], params: SamplingParams) -> AsyncIterator[asyncio.Task[Event]]:
    """A request from which nothing but its acceptance comes; leaving goes away as a client does."""

    async def second() -> Event:
        async with aclosing(made.client.generate(token_ids=ids, sampling=params, timeout_s=60.0)) as events:
            await anext(events)
            accepted.set()
            return await anext(events)

    accepted = asyncio.Event()
    task = asyncio.create_task(second())
    async with asyncio.timeout(WAIT_S):
        await accepted.wait()
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told_to_end(made: Stack) -> None:
    """The decode worker knows that the client has gone, while its step goes on."""
    await made.until(lambda: all(s.ending is not None for s in made.decodes[0].pipeline.sequences), FREE_S)


async def test_while_streaming() -> None:
    decode = engine()
    async with pair(decode=decode) as made:
        with decode.held():
            async with streaming(made, prompt(40), ENDLESS):
                async with asyncio.timeout(WAIT_S):
                    await decode.inside.wait()
                assert made.decodes[0].blocks.held_count == 11  # 40 tokens and the one it computes
            await told_to_end(made)
            assert made.decodes[0].blocks.held_count == 11  # a step writes them still
        await made.check_free(FREE_S)
        assert len(decode.steps) == 1
        assert (await made.ask(prompt(40), GREEDY)).ids == alone(prompt(40), GREEDY).ids


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_over_http(stream: bool) -> None:
    """The client leaves after its first piece, or before anything has come."""
    prefill, decode = (WatchedEngine(model(), engine().config) for _ in range(2))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 200, "stream": stream}
    async with stack() as made:
        await made.add_prefill(prefill, bundle=bundle())
        await made.add_decode(decode, bundle=bundle())
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
            with decode.held():
                sending = http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True})
                opening = asyncio.create_task(sending.__aenter__())
                async with asyncio.timeout(WAIT_S):
                    await decode.inside.wait()
                if stream:
                    answer = await opening
                    assert (await anext(answer.aiter_lines())).startswith("data: ")
                    await sending.__aexit__(None, None, None)
                else:
                    opening.cancel()
                    await asyncio.gather(opening, return_exceptions=True)
                await told_to_end(made)
        await made.check_free(FREE_S)
        assert len(decode.steps) == 1


async def test_in_the_middle_of_a_long_prompt() -> None:
    """Between two layers of its first chunk: no step of it ever ends."""
    prefill = engine()
    async with pair(prefill) as made:
        with prefill.held():
            async with asking(made, prompt(400), GREEDY):
                async with asyncio.timeout(WAIT_S):
                    await prefill.inside.wait()
                assert made.prefills[0].blocks.held_count == 100
            await made.until(lambda: any(p.dropped for p in made.prefills[0].pipeline.scheduler.running))
        await made.check_free(FREE_S)
        assert (prefill.layers_begun, prefill.steps) == (1, []) and TINY.layers > 1
        assert (await made.ask(prompt(20), GREEDY)).ids == alone(prompt(20), GREEDY).ids


async def test_in_prefills_queue() -> None:
    prefill = engine()
    async with stack() as made:
        await made.add_prefill(prefill, max_running=1)
        await made.add_decode()
        with prefill.held():
            first = asyncio.create_task(made.ask(prompt(20), GREEDY))
            async with asyncio.timeout(WAIT_S):
                await prefill.inside.wait()
            scheduler = made.prefills[0].pipeline.scheduler
            async with asking(made, prompt(30), GREEDY):
                await made.until(lambda: len(scheduler.waiting) == 1)
            await made.until(lambda: not scheduler.waiting, FREE_S)
            await made.until(lambda: len(made.decodes[0].pipeline.sequences) == 1, FREE_S)
        assert (await first).ids == alone(prompt(20), GREEDY).ids
        await made.check_free(FREE_S)


async def test_while_decode_has_no_pages_for_it() -> None:
    decode = engine(pages=16)  # 64 tokens: one such request at a time
    async with pair(decode=decode) as made:
        worker = made.decodes[0]
        with decode.held():
            first = asyncio.create_task(made.ask(prompt(30), replace(GREEDY, max_tokens=20)))
            async with asyncio.timeout(WAIT_S):
                await decode.inside.wait()
            held = worker.blocks.held_count
            async with asking(made, prompt(31, seed=1), replace(GREEDY, max_tokens=20)):
                await made.until(lambda: len(worker.pipeline.scheduler.grants) == 1)
                assert made.prefills[0].blocks.held_count == 8  # computed, and nowhere to go
            await made.until(lambda: not worker.pipeline.scheduler.grants, FREE_S)
            await made.until(lambda: made.prefills[0].blocks.held_count == 0, FREE_S)
            assert worker.blocks.held_count == held
        assert (await first).ids == alone(prompt(30), replace(GREEDY, max_tokens=20)).ids
        await made.check_free(FREE_S)


class HeldWrites(WatchedHost):
    """Whoever writes a frame into granted pages stands still."""

    def __init__(self, host: ReceiverHost) -> None:
        super().__init__(host)
        self.writing = asyncio.Event()
        self.may_write = threading.Event()

    async def grant(self, claim: Claim) -> PageSink:
        loop = asyncio.get_running_loop()

        def reached() -> None:
            loop.call_soon_threadsafe(self.writing.set)

        return GatedSink(await super().grant(claim), reached, self.may_write)


async def test_while_a_thread_writes_its_frames() -> None:
    """Prefill is free at once. Decode's pages stay with the request until nothing writes them any more."""
    async with pair() as made:
        prefill, decode = made.prefills[0], made.decodes[0]
        receiver = decode.pipeline.handoffs.receiver
        held = receiver._host = HeldWrites(receiver._host)
        try:
            async with asking(made, prompt(40), GREEDY):
                async with asyncio.timeout(WAIT_S):
                    await held.writing.wait()
                assert decode.blocks.held_count
            await made.until(lambda: not prefill.blocks.held_count and not prefill.pipeline.jobs, FREE_S)
            await told_to_end(made)
            assert decode.blocks.held_count, "a thread is about to write there"
        finally:
            held.may_write.set()
        await made.check_free(FREE_S)
        assert (await made.ask(prompt(40), GREEDY)).ids == alone(prompt(40), GREEDY).ids


async def test_the_calls_deadline_is_such_an_end() -> None:
    prefill = engine()
    async with pair(prefill) as made:
        with prefill.held():
            with pytest.raises(DeadlineExceeded):
                await made.ask(prompt(100), GREEDY, timeout_s=0.3)
            await made.until(lambda: any(p.dropped for p in made.prefills[0].pipeline.scheduler.running))
        await made.check_free(FREE_S)


async def test_many_that_leave_at_every_point_disturb_none_that_stay() -> None:
    """Half of forty clients leave after 1, 2, 3, ... events; both workers are short of pages and places."""
    prompts = [prompt(10 + 3 * n, seed=n) for n in range(20)]
    expected = [alone(ids, GREEDY).ids for ids in prompts]

    async def leaves(made: Stack, ids: Sequence[int], after: int) -> None:
        async with aclosing(made.client.generate(token_ids=ids, sampling=ENDLESS, timeout_s=60.0)) as events:
            while after:
                await anext(events)
                after -= 1

    async with stack() as made:
        await made.add_prefill(engine(pages=40), max_running=2, chunk_tokens=8)
        await made.add_decode(engine(pages=120), max_batch=6)
        leaving = asyncio.gather(*(leaves(made, ids, n) for n, ids in enumerate(prompts, 1)))
        staying = asyncio.gather(*(made.ask(ids, GREEDY) for ids in prompts))
        assert [answer.ids for answer in await staying] == expected
        await leaving
        await made.check_free(FREE_S)
