"""What a decode worker holds, request by request; and how little it holds while prefill is busy."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from decode_worker.sequence import State
from pdserve.errors import DeadlineExceeded, Refused
from pdserve.request import SamplingParams
from pdserve.v1 import worker_pb2
from tests.decode_worker.driving import Gate, bring_to
from tests.decode_worker.rig import Call, Rig, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=80)


async def accounts_of(r: Rig) -> worker_pb2.AccountsResponse:
    response = await r.about.Accounts(worker_pb2.AccountsRequest())
    assert isinstance(response, worker_pb2.AccountsResponse)
    return response


async def admitted(stack: AsyncExitStack, r: Rig, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[Call]:
    calls = []
    for ids in prompts:
        calls.append(await stack.enter_async_context(r.call(ids, params)))
        await calls[-1].admitted()
    return calls


async def test_requests_that_wait_for_prefill_hold_no_page() -> None:
    async with rig() as r, AsyncExitStack() as stack:
        await admitted(stack, r, [prompt(60, seed=n) for n in range(40)], LONG)
        assert len(r.worker.pipeline.scheduler.waiting) == 40
        accounts = await accounts_of(r)
        assert (accounts.pages_held, accounts.pages_free, accounts.intact) == (0, 64, True)
        assert {(h.kind, h.pages) for h in accounts.holdings} == {("ticket", 0)} and len(accounts.holdings) == 40


async def test_pins_of_those_that_wait_take_half_of_the_pool_at_most_and_expire() -> None:
    async with rig(decode=tiny_engine(deterministic=True, pages=20), ticket_ttl_s=1.0) as r:
        for n in range(3):
            await r.generate(prompt(17, seed=n), PARAMS)
        async with AsyncExitStack() as stack:
            prompts = [(*prompt(17, seed=n % 3), n) for n in range(12)]  # four pages of each are here
            calls = await admitted(stack, r, prompts, PARAMS)
            accounts = await accounts_of(r)
            pins = [h.pages for h in accounts.holdings if h.kind == "pin"]
            assert pins == [4] * 8 and accounts.pages_held == 8  # two prefixes; a third would pass the half of 20
            assert all(0 < h.deadline_left_s <= 1.0 for h in accounts.holdings)
            assert accounts.intact
            for call in calls:  # no push ever came
                with pytest.raises(DeadlineExceeded):
                    await call.answer()
            await r.empty()


async def test_a_request_is_listed_by_what_it_holds_in_every_state() -> None:
    async with rig() as r:
        await r.generate(prompt(9), PARAMS)  # so that the next one finds two pages of its prompt
        for state, kinds in (
            (State.WAITING, {"ticket": 0, "pin": 2}),
            (State.GRANTED, {"grant": 1, "pin": 2}),
            (State.VERIFIED, {"request": 1, "pin": 2}),
        ):
            gate = Gate(r) if state is State.VERIFIED else None
            if gate:
                await gate.closed()
            r.states.reached[state].clear()
            async with r.call(prompt(9), PARAMS) as call:
                task = await bring_to(state, r, call)
                accounts = await accounts_of(r)
                assert {h.kind: h.pages for h in accounts.holdings} == kinds
                assert all(h.deadline_left_s > 0 for h in accounts.holdings) and accounts.intact
            if gate:
                await gate.open()
            if task is not None:
                await asyncio.wait({task})
                task.exception()
            await r.empty()
        accounts = await accounts_of(r)
        assert accounts.intact and not accounts.holdings and not accounts.pages_held


async def test_logits_alone_are_a_ticket_without_pages() -> None:
    async with rig() as r, r.call(prompt(9), replace(PARAMS, max_tokens=1)) as call:
        await call.admitted()
        [holding] = (await accounts_of(r)).holdings
        assert (holding.kind, holding.pages) == ("ticket", 0) and holding.deadline_left_s > 0


@pytest.mark.parametrize("fault", ["orphan", "leak", "theft", "no deadline"])
async def test_a_planted_fault_is_named(fault: str) -> None:
    async with rig() as r, r.call(prompt(9), LONG) as call:
        gate = Gate(r)
        await gate.closed()
        await bring_to(State.VERIFIED, r, call)
        [sequence] = r.worker.pipeline.sequences
        assert (await accounts_of(r)).intact
        pages, ends_at = sequence.pages, sequence.ends_at
        if fault == "orphan":
            r.worker.blocks.allocate("gone#7", 2)
            expected = "nobody alive answers for the 2 pages of gone#7"
        elif fault == "leak":
            sequence.pages = pages[:-1]
            expected = "r#1 says it holds pages [0, 1], booked are [0, 1, 2]"
        elif fault == "theft":
            sequence.pages = (*pages, 40)
            expected = "r#1 says it holds pages [0, 1, 2, 40], booked are [0, 1, 2]"
        else:
            sequence.ends_at = float("inf")
            expected = "r#1 has no deadline"
        accounts = await accounts_of(r)
        assert not accounts.intact and expected in accounts.fault
        assert (fault == "orphan") == ("orphan" in {h.kind for h in accounts.holdings})
        sequence.pages, sequence.ends_at = pages, ends_at
        r.worker.blocks.release("gone#7")
        assert (await accounts_of(r)).intact
        r.worker.pipeline.end(sequence, State.ABORTED, Refused("test"))
        await gate.open()
