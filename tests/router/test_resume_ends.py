"""Resumptions that end early: the deadline, the router, the last worker, or the client puts an end to them."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.router.orchestrated import IDS, failure_of
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.resuming import beginning
from tests.router.support import ids_of


async def test_the_deadline_ends_a_resumption() -> None:
    async with beginning({"tokens": 3}, request_timeout_s=1.5) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            events, error = await failure_of(made)
        assert ids_of(events) == (0, 1, 2) and error.reason == "DEADLINE_EXCEEDED"
        assert "after 3 tokens" in error.message and deaf.calls == 1


async def test_the_end_of_the_router_ends_a_resumption() -> None:
    async with beginning({"tokens": 3}) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            ending = asyncio.create_task(failure_of(made))
            async with asyncio.timeout(10):
                await deaf.called.wait()
            made.router.orchestrator.end()
            events, error = await ending
        assert ids_of(events) == (0, 1, 2) and (type(error), error.reason) == (Unavailable, "DRAINING")
        assert made.router.orchestrator.active == 0


async def test_when_the_last_workers_are_lost_too_their_error_is_the_answers_end() -> None:
    """Never a finish; and a worker that was lost is not asked again."""
    lost = BadPrefill(lies=1, error=Unavailable("gone", reason=WORKER_LOST))
    async with beginning({"tokens": 3}) as (made, peer), serving(lost) as address:
        await made.add_ghost("quick", PREFILL, address)
        await made.add_ghost("gone", DECODE)
        await made.prefills.pop().stop()
        await made.router.pool.refresh()
        events, error = await failure_of(made)
        assert ids_of(events) == (0, 1, 2) and error.reason == WORKER_LOST
        assert not any(isinstance(event, Finish) for event in events)
        assert peer.calls == 1 and lost.calls <= 2


async def test_a_prefill_worker_is_free_while_the_answer_goes_on() -> None:
    """Else its later end would hide the work of others from placement."""
    go_on = asyncio.Event()
    prefill = BadPrefill(lies=1)
    async with beginning({"tokens": 3, "wait": go_on, "end": Finish("stop")}) as (made, _), serving(prefill) as address:
        await made.add_ghost("quick", PREFILL, address)
        made.make_look_busy("p0")
        request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=8)))
        quick, bad = made.member("quick"), made.member("bad")
        async for event in made.router.orchestrator.generate(request):
            if isinstance(event, TokenBatch):
                async with asyncio.timeout(10):  # its own answer may come after the token
                    while made.router.pool.load(quick) != quick.record.load:
                        await made.decodes_reachable()
                assert made.router.pool.load(bad).running == bad.record.load.running + 1
                go_on.set()
        assert made.router.pool.load(bad) == bad.record.load


@pytest.mark.parametrize("steps_between", range(4))
async def test_two_cancellations_leave_no_work_behind(steps_between: int) -> None:
    """As of a deadline and a client that leaves then: the second one meets the cleaning up after the first."""
    prefill = BadPrefill()
    async with beginning({"tokens": 3}) as (made, _), serving(prefill) as address:
        await made.add_ghost("hangs", PREFILL, address)
        made.make_look_busy("p0")
        request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=8)))
        asking = asyncio.create_task(anext(made.router.orchestrator.generate(request)))
        async with asyncio.timeout(10):
            await prefill.called.wait()
        (running,) = [task for task in asyncio.all_tasks() if task.get_name() == request.id]
        running.cancel()
        for _ in range(steps_between):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
        async with asyncio.timeout(10):
            await prefill.cancelled.wait()
        for worker_id in ("hangs", "bad"):
            member = made.member(worker_id)
            assert made.router.pool.load(member) == member.record.load
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(request.id)]


async def test_a_client_that_leaves_during_a_resumption_leaves_no_work_behind() -> None:
    async with beginning({"tokens": 3}) as (made, _):
        deaf = BadDecode(made.decodes[0].contract, mute=True)
        async with serving(deaf) as address:
            await made.decodes.pop().stop()
            await made.add_ghost("deaf", DECODE, address)
            made.make_look_busy("deaf")
            before = made.router.pool.load(made.member("deaf"))
            asking = asyncio.create_task(failure_of(made))
            async with asyncio.timeout(10):
                await deaf.called.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await made.router.orchestrator.idle()
            assert made.router.pool.load(made.member("deaf")) == before
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("req-")]
