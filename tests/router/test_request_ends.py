"""Requests that end before their answer does, and requests that others make wait."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from pdserve.errors import DeadlineExceeded, Exhausted
from pdserve.registry.records import PREFILL
from pdserve.rpc.events import Accepted, TokenBatch
from tests.engine.tiny import prompt
from tests.router.orchestrated import IDS, failure_of, request_of
from tests.router.peers import BadPrefill, serving
from tests.router.support import VOCAB, house, ids_of, record_of


async def test_leaving_the_stream_cancels_both_calls() -> None:
    peer = BadPrefill()
    async with house(prefills=0) as made, serving(peer) as address:
        await made.add_ghost("hangs", PREFILL, address)
        async with aclosing(made.router.orchestrator.generate(await request_of(made))) as events:
            assert isinstance(await anext(events), Accepted)
            async with asyncio.timeout(5):
                await peer.called.wait()
        async with asyncio.timeout(5):
            await peer.cancelled.wait()
        await made.assert_nothing_held()


async def test_leaving_in_the_middle_of_an_answer_frees_everything() -> None:
    async with house() as made:
        events = made.router.orchestrator.generate(await request_of(made, max_tokens=200))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TokenBatch):
                    break
        await made.assert_nothing_held()
        assert len(ids_of(await made.generate(IDS, max_tokens=5))) == 5


async def test_the_deadline_ends_a_request() -> None:
    peer = BadPrefill()
    async with house(prefills=0) as made, serving(peer) as address:
        await made.add_ghost("hangs", PREFILL, address)
        _, error = await failure_of(made, timeout_s=1.5)
        assert isinstance(error, DeadlineExceeded) and "before its first token" in error.message
        async with asyncio.timeout(5):
            await peer.cancelled.wait()


async def test_only_so_many_requests_are_active() -> None:
    peer = BadPrefill()
    async with house(prefills=0, max_active=1) as made, serving(peer) as address:
        await made.add_ghost("hangs", PREFILL, address)
        async with aclosing(made.router.orchestrator.generate(await request_of(made))) as events:
            await anext(events)
            _, error = await failure_of(made)
            assert isinstance(error, Exhausted) and error.reason == "ROUTER_FULL"
            assert error.retry_after_ms > 0


async def test_a_full_queue_is_exhausted_and_the_others_are_unaffected() -> None:
    async with house(decodes=0) as made:
        await made.add_decode("d0", max_queue=1)
        peer = BadPrefill()
        async with serving(peer) as address:
            await made.add_ghost("hangs", PREFILL, address)
            made.make_look_busy("p0")
            async with aclosing(made.router.orchestrator.generate(await request_of(made))) as waiting:
                await anext(waiting)
                _, error = await failure_of(made)
                assert isinstance(error, Exhausted)
        assert len(ids_of(await made.generate(IDS, max_tokens=5))) == 5


async def test_a_slow_client_gets_every_token_in_fewer_messages() -> None:
    async with house(backlog_tokens=16) as made:
        expected = ids_of(await made.generate(IDS, max_tokens=150, ignore_eos=True))
        request = await request_of(made, max_tokens=150)
        batches: list[TokenBatch] = []
        async with aclosing(made.router.orchestrator.generate(request)) as events:
            async for event in events:
                if isinstance(event, TokenBatch):
                    batches.append(event)
                    # A status round trip or two of time, in which tokens pile up.
                    for _ in range(5):
                        await made.router.pool.refresh()
                        await made.assert_reachable()
        assert tuple(token for batch in batches for token in batch.ids) == expected
        assert [batch.first_index for batch in batches] == [
            sum(len(b.ids) for b in batches[:i]) for i in range(len(batches))
        ]
        assert len(batches) < 150


async def test_many_requests_over_two_pairs_equal_one_at_a_time() -> None:
    prompts = [prompt(20 + 3 * i, seed=i, vocab=VOCAB) for i in range(8)]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7}
    async with house() as made:
        alone = [ids_of(await made.generate(ids, **options)) for ids in prompts]
    async with house(prefills=2, decodes=2) as made:
        together = await asyncio.gather(*(made.generate(ids, **options) for ids in prompts))
        assert [ids_of(events) for events in together] == alone
        assert {record_of(events).prefill_worker for events in together} == {"p0", "p1"}
        assert {record_of(events).decode_worker for events in together} == {"d0", "d1"}
