"""The end of a split prompt: when its layers may run, what else runs beside them, and what is left when it fails."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cache_transfer.contract import CachePlane
from decode_worker.prompts import Prompts
from decode_worker.tail import Arrivals, Tail
from pdserve.engine.plan import Chunk
from pdserve.engine.rate import pairs
from pdserve.errors import InvalidRequest, PdserveError, Refused
from pdserve.request import SamplingParams
from pdserve.v1 import common_pb2, decode_pb2
from tests.decode_worker.prefill_side import Computed
from tests.decode_worker.rig import Call, Rig, local, rig
from tests.decode_worker.test_choices import read
from tests.decode_worker.test_prompts import FIXED_S, learned
from tests.engine.tiny import prompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0)


def arrivals(planes: Sequence[Sequence[CachePlane]], tokens: int) -> tuple[Arrivals, list[int]]:
    told: list[int] = []
    made = Arrivals(planes, tokens, lambda: told.append(made.layers))
    return made, told


def test_a_layer_is_whole_when_all_heads_and_tokens_of_all_its_planes_are_there() -> None:
    planes = ((CachePlane("k", 2, 8), CachePlane("v", 3, 8)), (), (CachePlane("conv", 1, 64),))
    made, told = arrivals(planes, 10)
    made.wrote(2, (0, 1), (0, 10))  # out of order
    made.wrote(0, (0, 2), (0, 10))
    made.wrote(0, (0, 3), (0, 4))
    made.wrote(0, (1, 3), (4, 10))
    assert (made.layers, told) == (0, [])
    made.wrote(0, (0, 1), (4, 10))
    assert (made.layers, told) == (3, [3])  # the second layer has no planes


def test_nothing_is_lost_when_several_threads_count() -> None:
    planes = ((CachePlane("k", 4, 8),),) * 50
    made, told = arrivals(planes, 64)
    pieces = [
        (layer, (head, head + 1), (t, t + 8)) for layer in range(50) for head in range(4) for t in range(0, 64, 8)
    ]
    random.Random(1).shuffle(pieces)

    def write(number: int) -> None:
        for piece in pieces[number::4]:
            made.wrote(*piece)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.layers == 50 and max(told) == 50


def tail(start: int = 512, tokens: int = 240, layers: int = 30) -> Tail:
    made, _ = arrivals(((CachePlane("k", 1, 8),),) * layers, 1)
    return Tail(Chunk("a", (1,) * tokens, start, ()), made, layers, 60.0)


def test_the_parts_of_a_tail_cost_as_much_as_the_whole() -> None:
    made = tail()
    for layers in (1, 7, 30):
        start, count = made.span(layers)
        assert count * 30 == 240 * layers
        assert pairs(start, count) * 30 == pytest.approx(pairs(512, 240) * layers, rel=0.002)
    made.done = 20
    assert made.remaining == 80


def test_a_step_has_as_many_layers_as_let_it_end_within_its_limit() -> None:
    made, cost = tail(tokens=300), learned()
    prompts = Prompts(chunk_tokens=256, step_s=0.15, cost=cost)
    streams = [(100, 1)] * 3
    layers = prompts.layers(made.span, 30, streams, True)
    allowed = 0.15 + FIXED_S
    assert cost.predict([*streams, made.span(layers)]) <= allowed + 0.002
    assert cost.predict([*streams, made.span(layers + 1)]) > allowed - 0.03
    assert prompts.layers(made.span, 2, streams, True) == 2  # no more than there are
    assert replace(prompts, step_s=0.0).layers(made.span, 30, streams, True) == 30
    slow = replace(prompts, step_s=0.03)
    assert slow.layers(made.span, 30, streams, True) == 0  # a single one would keep the streams too long
    assert slow.layers(made.span, 30, [], False) >= 1
    assert Prompts(256, 0.1).layers(made.span, 30, streams, True) == 1  # nothing is known yet


@asynccontextmanager
async def split(
    r: Rig, ids: Sequence[int], at: int, **fields: Any
) -> AsyncIterator[tuple[Call, decode_pb2.Admitted, Computed]]:
    """A request whose handoff brings `at` tokens, admitted, and the cache of those."""
    async with r.call(ids, GREEDY, handoff_tokens=at, **fields) as call:
        admitted = await call.admitted()
        assert (admitted.identity.end, admitted.logits_only) == (at, False)
        yield call, admitted, r.prefill.compute(tuple(ids)[:at])


async def tokens(call: Call) -> tuple[int, ...]:
    """What comes after the account of the end, which comes first."""
    first = await call.event()
    assert first.WhichOneof("event") == "prefilled"
    assert first.prefilled.computed_tokens == len(call.ids) - call._opening.handoff_tokens
    return (await call.answer()).ids


@pytest.mark.parametrize("at", [1, 4, 39, 40, 60])
async def test_what_a_handoff_leaves_out_is_computed_here(at: int) -> None:
    ids = prompt(61, seed=3)
    (expected,) = local([ids], GREEDY)
    async with rig() as r:
        for _ in range(2):  # the second time with what is kept of the first
            async with split(r, ids, at) as (call, admitted, computed):
                await r.push(admitted, computed)
                assert await tokens(call) == expected.ids
        await r.empty()


async def test_an_attempt_that_fails_in_any_layer_is_followed_by_another() -> None:
    ids = prompt(61, seed=3)
    (expected,) = local([ids], GREEDY)
    async with rig() as r:
        for layers in range(r.prefill.engine.spec.layers):
            async with split(r, ids, 40, tenant=f"t{layers}") as (call, admitted, computed):
                sender = r.sender(admitted, computed, layers=layers, deadline_s=0.3)
                with pytest.raises(PdserveError):
                    await sender.run()
                await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=call._opening.prefill_contract))
                ticket: common_pb2.Ticket = await call.ticket()
                admitted.identity.start = ticket.held_tokens
                await r.push(admitted, computed, ticket=ticket)
                assert await tokens(call) == expected.ids
        await r.empty()


async def test_outputs_of_a_prompt_whose_end_was_done_before_its_handoff_failed_wait_for_the_next_one() -> None:
    ids, choices = prompt(61, seed=3), [decode_pb2.OpenChoice(choice=n) for n in range(2)]
    async with rig() as r:
        async with r.call(ids, GREEDY, choices=choices, tenant="whole") as call:
            await r.push(await call.admitted(), r.prefill.compute(ids))
            wanted = await read(call, 2)
        async with split(r, ids, 40, choices=choices) as (call, admitted, computed):
            layers = r.prefill.engine.spec.layers
            sender = r.sender(admitted, computed, layers=layers - 1, deadline_s=0.5)
            sender.computed(layers - 1, (0, 40))  # all of the cache, but neither logits nor commit
            with pytest.raises(PdserveError):
                await sender.run()
            await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=call._opening.prefill_contract))
            ticket = await call.ticket()
            admitted.identity.start = ticket.held_tokens
            await r.push(admitted, computed, ticket=ticket)
            assert (await call.event()).WhichOneof("event") == "prefilled"
            told = await read(call, 2)
        assert {n: one.said for n, one in told.items()} == {n: one.said for n, one in wanted.items()}
        await r.empty()


async def test_the_whole_prompt_is_computed_here_when_the_caller_gives_the_handoff_up() -> None:
    ids = prompt(61, seed=3)
    (expected,) = local([ids], GREEDY)
    async with rig() as r:
        async with split(r, ids, 40) as (call, _, _):
            await call.send(retry=decode_pb2.DecodeRetry(prefill_here=True))
            first = await call.event()
            assert first.prefilled.computed_tokens == 61
            assert (await call.answer()).ids == expected.ids
        await r.empty()


@pytest.mark.parametrize("at", [61, 62, 1000])
async def test_a_handoff_cannot_bring_all_of_a_split_prompt_or_more(at: int) -> None:
    async with rig() as r, r.call(prompt(61), GREEDY, handoff_tokens=at) as call:
        with pytest.raises(InvalidRequest, match="cannot bring") as caught:
            await call.event()
        assert (caught.value.reason, caught.value.field) == ("INVALID_HANDOFF_TOKENS", "handoff_tokens")


async def test_workers_of_other_arithmetic_do_not_share_a_prompt() -> None:
    async with rig() as r:
        own = r.prefill.contract.info
        other = replace(r.prefill.contract, info={**own, "deterministic": str(own["deterministic"] == "false").lower()})
        async with r.call(prompt(61), GREEDY, handoff_tokens=40, contract=other) as call:
            with pytest.raises(Refused, match="numerics") as caught:
                await call.event()
            assert caught.value.reason == "NUMERICS_CHANGED"
