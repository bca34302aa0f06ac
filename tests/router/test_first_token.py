"""Before the first token: workers that are silent, and caches that had arrived before their sender failed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.errors import Exhausted, Internal, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.rpc.events import Finish
from router.failures import FIRST_TOKEN_TIMEOUT
from router.wire import WORKER_LOST
from tests.engine.tiny import prompt
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.support import ENGINE, MODEL, VOCAB, House, finish_of, house, ids_of, record_of

IDS = prompt(50, seed=3, vocab=VOCAB)
LIMIT_S = 2.0  # far more than a healthy worker takes, even here


def ready(made: House) -> list[str]:
    return [member.id for member in made.router.pool.ready(MODEL)]


async def test_a_prefill_worker_that_is_silent_is_given_up() -> None:
    peer = BadPrefill()
    async with house(first_token_timeout_s=LIMIT_S) as made, serving(peer) as address:
        expected = ids_of(await made.generate(IDS, max_tokens=8))
        await made.add_ghost("silent", PREFILL, address)
        made.make_look_busy("p0")
        async with asyncio.timeout(20):
            events = await made.generate(IDS, max_tokens=8)
        record = record_of(events)
        assert ids_of(events) == expected
        assert (record.attempts, record.prefill_worker, record.decode_worker) == (2, "p0", "d0")
        assert any("silent" in note and FIRST_TOKEN_TIMEOUT in note for note in record.notes)
        assert ready(made) == ["d0", "p0"]
        async with asyncio.timeout(5):
            await peer.cancelled.wait()


async def test_a_decode_worker_that_is_silent_after_the_cache_has_come_is_given_up() -> None:
    async with house(first_token_timeout_s=LIMIT_S) as made:
        prefill = BadPrefill(lies=1, error=Exhausted("full"))
        decode = BadDecode(made.decodes[0].contract, wait=asyncio.Event())
        async with serving(prefill) as quick, serving(decode) as hung:
            await made.add_ghost("quick", PREFILL, quick)
            await made.add_ghost("silent", DECODE, hung)
            made.make_look_busy("p0")
            made.make_look_busy("d0")
            async with asyncio.timeout(20):
                events = await made.generate(IDS, max_tokens=8)
            record = record_of(events)
            assert len(ids_of(events)) == 8
            assert (record.prefill_worker, record.decode_worker) == ("p0", "d0")
            assert any("decode worker silent" in note and FIRST_TOKEN_TIMEOUT in note for note in record.notes)
            assert "silent" not in ready(made) and "quick" in ready(made)


async def test_without_another_pair_the_silence_is_the_clients_error() -> None:
    async with house(prefills=0, first_token_timeout_s=0.3) as made, serving(BadPrefill()) as address:
        await made.add_ghost("silent", PREFILL, address)
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(20):
                await made.generate(IDS)
        assert (caught.value.reason, caught.value.field) == (FIRST_TOKEN_TIMEOUT, "router.first_token_timeout_s")


async def test_an_answer_may_take_longer_than_its_first_token() -> None:
    async with house(first_token_timeout_s=0.5) as made:
        go_on = asyncio.Event()
        decode = BadDecode(made.decodes[0].contract, tokens=3, wait=go_on, end=Finish("stop"))
        async with serving(decode) as address:
            await made.add_ghost("slow", DECODE, address)
            made.make_look_busy("d0")
            asyncio.get_running_loop().call_later(1.0, go_on.set)
            async with asyncio.timeout(20):
                events = await made.generate(IDS)
            assert (ids_of(events), finish_of(events).reason) == ((0, 1, 2), "stop")


@pytest.mark.parametrize("error", [Unavailable("going", reason="GOING"), Internal("broken", reason="BROKEN")])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_cache_that_came_before_its_sender_failed_is_used(error: PdserveError, others: int) -> None:
    """Only decode knows that it has everything, so it is asked first, whatever prefill said and whoever is left."""
    prefill = BadPrefill(error)
    async with house(prefills=others) as made:
        decode = BadDecode(made.decodes[0].contract, tokens=3, complete=True, end=Finish("stop"))
        async with serving(prefill) as failing, serving(decode) as address:
            await made.add_ghost("failing", PREFILL, failing)
            await made.add_ghost("whole", DECODE, address)
            for worker in made.workers:
                made.make_look_busy(worker.worker_id)
            async with asyncio.timeout(20):
                events = await made.generate(IDS)
            assert (ids_of(events), finish_of(events).reason) == ((0, 1, 2), "stop")
            assert (prefill.calls, decode.calls, record_of(events).attempts) == (1, 1, 1)
            assert any("failing" in note and error.reason in note for note in record_of(events).notes)


async def test_a_cache_that_had_not_come_is_asked_of_no_one_when_nobody_is_left() -> None:
    prefill = BadPrefill(Unavailable("going", reason="GOING"))
    async with house(prefills=0) as made, serving(prefill) as address:
        await made.add_ghost("failing", PREFILL, address)
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(20):
                await made.generate(IDS)
        assert (caught.value.reason, prefill.calls) == ("GOING", 1)


async def test_a_request_without_a_limit_moves_to_a_smaller_pair() -> None:
    async with house(decodes=0) as made:
        await made.add_decode("small", engine=replace(ENGINE, pages=16))
        await made.add_ghost("wide", DECODE)
        events = await made.generate(IDS, ignore_eos=True)
        record = record_of(events)
        assert (record.attempts, record.decode_worker) == (2, "small")
        assert any("wide" in note and WORKER_LOST in note for note in record.notes)
        # The context that the worker promises is what its 16 pages of 4 tokens hold.
        assert len(ids_of(events)) == 16 * 4 - len(IDS)
        assert any("cut from 206 to 14" in note for note in record.notes)


async def test_the_pages_that_decode_will_grant_are_counted_at_once() -> None:
    prefill = BadPrefill()
    async with house(prefills=0) as made, serving(prefill) as address:
        await made.add_ghost("hangs", PREFILL, address)
        for max_tokens, pages in ((1, 0), (9, 13)):  # 50 tokens and the first growth, of 4 to a page
            prefill.called.clear()
            running = asyncio.create_task(made.generate(IDS, max_tokens=max_tokens))
            async with asyncio.timeout(5):
                await prefill.called.wait()
            jobs = [job for of in made.router.pool._jobs.values() for job in of if job.ended is None]
            assert [job.pages for job in jobs if job.member.id == "d0"] == [pages]
            running.cancel()
            await asyncio.wait({running})


async def test_a_pair_of_two_modes_is_noted() -> None:
    async with house(prefills=0) as made:
        await made.add_prefill("p0", engine=replace(ENGINE, deterministic=not ENGINE.deterministic))
        record = record_of(await made.generate(IDS, max_tokens=2))
        assert any("deterministic mode" in note for note in record.notes)
