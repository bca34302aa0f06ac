"""Cancellation, expiry, bad logits and full queues: a typed error, nothing held, others unharmed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cache_transfer.contract import HandoffIdentity, Ticket
from cache_transfer.wire import identity_to_proto, ticket_to_proto
from decode_worker.admission import DecodeRequest
from decode_worker.sequence import State
from pdserve.errors import (
    DeadlineExceeded,
    Exhausted,
    Fenced,
    Internal,
    PdserveError,
    Refused,
)
from pdserve.request import SamplingParams
from pdserve.rpc.events import Finish, TokenBatch
from pdserve.v1 import decode_pb2
from tests.decode_worker.driving import Gate, bring_to
from tests.decode_worker.rig import WAIT_S, Rig, local, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=80)
GRANTED_PAGES = 3  # of 4 tokens: 9 of the prompt and the first of the output


async def check_serves(r: Rig) -> None:
    """Others are unharmed: the same worker answers as one process does."""
    assert (await r.generate(prompt(6, seed=9), PARAMS)).ids == local([prompt(6, seed=9)], PARAMS)[0].ids


@pytest.mark.parametrize("state", [State.WAITING, State.GRANTED, State.RECEIVING, State.VERIFIED, State.DECODING])
async def test_a_caller_may_leave_in_every_state(state: State) -> None:
    async with rig() as r:
        gate = Gate(r) if state is State.VERIFIED else None
        if gate:
            await gate.closed()
        async with r.call(prompt(9), LONG) as call:
            task = await bring_to(state, r, call)
            if state is State.DECODING:
                assert r.worker.blocks.held_count >= GRANTED_PAGES  # and more with every fourth token
            else:
                assert r.worker.blocks.held_count == (0 if state is State.WAITING else GRANTED_PAGES)
        if gate:
            await gate.open()
        await r.states.wait(State.ABORTED)
        await r.empty()
        if task is not None:
            done, _ = await asyncio.wait({task}, timeout=WAIT_S)
            assert done
            error = task.exception()
            assert error is None or isinstance(error, Fenced)
            assert (error is None) == (state in (State.VERIFIED, State.DECODING))
        await check_serves(r)


async def test_pages_stay_while_the_running_step_writes_them() -> None:
    async with rig() as r:
        call = r.call(prompt(9), LONG)
        async with call:
            gate = Gate(r)
            await gate.closed()  # from here on a plan waits for the engine's thread
            await bring_to(State.VERIFIED, r, call)
            [sequence] = r.worker.pipeline.scheduler.running
            await r.describe_until(lambda: sequence.stepping)
            r.worker.pipeline.end(sequence, State.ABORTED, Refused("test"))
            assert sequence.state is State.VERIFIED and r.worker.blocks.held_count == GRANTED_PAGES
            await gate.open()
            await r.states.wait(State.ABORTED)
            assert r.worker.blocks.held_count == 0
            with pytest.raises(Refused):
                await call.answer()


@pytest.mark.parametrize("state", [State.WAITING, State.GRANTED, State.RECEIVING])
async def test_what_takes_too_long_expires_without_traffic(state: State) -> None:
    settings: dict[str, Any] = {"ticket_ttl_s": 0.2} if state is State.WAITING else {"receive_s": 0.2}
    async with rig(**settings) as r, r.call(prompt(9), PARAMS) as call:
        task = await bring_to(state, r, call)
        with pytest.raises(DeadlineExceeded) as caught:
            await call.answer()
        assert caught.value.reason == ("TICKET_EXPIRED" if state is State.WAITING else "RECEIVE_TIMEOUT")
        assert caught.value.retryable
        await r.empty()
        if task is not None:
            with pytest.raises(PdserveError):
                await task
        await check_serves(r)


async def test_a_full_queue_refuses_and_recovers() -> None:
    async with rig(max_queue=2) as r:
        one, two, three = (r.call(prompt(n), PARAMS) for n in (5, 6, 7))
        async with one, two:
            await one.admitted()
            admitted = await two.admitted()
            async with three:
                with pytest.raises(Exhausted) as caught:
                    await three.event()
            assert caught.value.reason == "QUEUE_FULL" and caught.value.retryable
            await r.push(admitted, r.prefill.compute(two.ids))
            await two.answer()
        await r.states.wait(State.ABORTED)
        await r.empty()
        await check_serves(r)


async def test_pages_are_granted_in_order() -> None:
    async with rig(decode=tiny_engine(deterministic=True, pages=10)) as r:
        wanted = [(28, 6), (22, 6), (3, 3)]  # prompt and its first growth: 8, 6 and 1 pages of ten
        calls = [r.call(prompt(n, seed=n), replace(PARAMS, max_tokens=m)) for n, m in wanted]
        async with calls[0], calls[1], calls[2]:
            admitted = [await call.admitted() for call in calls]
            computed = [r.prefill.compute(call.ids) for call in calls]
            first = r.sender(admitted[0], computed[0], layers=1)
            tasks = [asyncio.create_task(first.run())]
            await r.states.wait(State.RECEIVING)
            for n in (1, 2):
                tasks.append(asyncio.create_task(r.sender(admitted[n], computed[n]).run()))
                await r.describe_until(partial(waiting_grants, r, n))
            # The third would fit beside the first, but the second came before it.
            assert r.worker.blocks.held_count == 8
            for layer in (1, 2):
                first.computed(layer, (0, 28))
            first.logits(computed[0].dtype, computed[0].logits, 27)
            answers = [await call.answer() for call in calls]
            await asyncio.gather(*tasks)
        for answer, (n, m) in zip(answers, wanted, strict=True):
            assert answer.ids == local([prompt(n, seed=n)], replace(PARAMS, max_tokens=m))[0].ids


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_logits_that_are_not_finite_fail_the_request_alone(bad: float) -> None:
    async with rig() as r, r.call(prompt(9), PARAMS) as call:
        admitted, computed = await call.admitted(), r.prefill.compute(call.ids)
        logits = np.frombuffer(computed.logits, np.float32).copy()
        logits[50] = bad
        await r.push(admitted, computed, logits=logits.tobytes())
        with pytest.raises(Internal) as caught:
            await call.answer()
        assert caught.value.reason == "LOGITS_NOT_FINITE"
        await check_serves(r)


async def test_a_fault_in_a_step_fails_its_sequences_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with rig() as r, r.call(prompt(9), LONG) as call:
        cache = r.worker.engine.cache
        await bring_to(State.DECODING, r, call)
        del r.worker.engine.cache  # the planted fault: the next step raises AttributeError
        with pytest.raises(Internal, match="the engine failed"):
            await call.answer()
        r.worker.engine.cache = cache
        await r.empty()
        await check_serves(r)


async def test_a_slow_reader_pauses_only_its_own_sequence() -> None:
    async with rig(max_unread_tokens=5) as r:
        sequence, _, ticket = r.worker.submit(_request(r, prompt(9), LONG))
        assert ticket is not None and sequence.identity is not None
        admitted = _admitted(r, sequence.identity, ticket)
        await r.push(admitted, r.prefill.compute(prompt(9)))
        await check_serves(r)  # so the loop has made many steps meanwhile
        assert sequence.stream.unread == 5
        ids: tuple[int, ...] = ()
        sizes = []
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await sequence.stream.next(), Finish):
                assert isinstance(event, TokenBatch) and event.first_index == len(ids)
                ids += event.ids
                sizes.append(len(event.ids))
        assert sizes[0] == 5 and max(sizes) <= 5  # what waited came as one message
        assert ids == local([prompt(9)], LONG)[0].ids


async def test_a_reader_that_never_comes_back_loses_its_sequence() -> None:
    async with rig(max_unread_tokens=5, reader_s=0.1) as r:
        sequence, _, ticket = r.worker.submit(_request(r, prompt(9), LONG))
        assert ticket is not None and sequence.identity is not None
        await r.push(_admitted(r, sequence.identity, ticket), r.prefill.compute(prompt(9)))
        await r.states.wait(State.EXPIRED)
        await r.empty()
        first = await sequence.stream.next()  # what was there is still delivered
        assert isinstance(first, TokenBatch) and len(first.ids) == 5
        with pytest.raises(DeadlineExceeded) as caught:
            await sequence.stream.next()
        assert caught.value.reason == "SLOW_READER"


def waiting_grants(r: Rig, count: int) -> bool:
    return len(r.worker.pipeline.scheduler.grants) == count


def _request(r: Rig, ids: tuple[int, ...], params: SamplingParams) -> DecodeRequest:
    return DecodeRequest("direct", "", "t", None, ids, (), 0, params, r.prefill.contract)


def _admitted(r: Rig, identity: HandoffIdentity, ticket: Ticket) -> decode_pb2.Admitted:
    return decode_pb2.Admitted(ticket=ticket_to_proto(ticket), identity=identity_to_proto(identity))
