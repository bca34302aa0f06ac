"""Prompts whose beginning a prefill worker computes and whose end a decode worker does, in the whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from pdserve.client.events import Completion
from pdserve.engine.engine import Engine
from pdserve.engine.layered import LayeredStep
from pdserve.engine.plan import EngineConfig, StepPlan
from pdserve.registry.records import Load, Registry, WorkerRecord
from pdserve.request import SamplingParams
from pdserve.rpc.events import AttemptRecord
from tests.e2e.stack import Stack, alone, ends_elsewhere, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import prompt, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0)
SAMPLED = SamplingParams(seed=77, max_tokens=8, temperature=1.1, top_p=0.9, repetition_penalty=1.2, logprobs=2)
ONE = SamplingParams(temperature=0, max_tokens=1, seed=0)


class Telling:
    """The way to a registry of a worker that tells other rates than its own, so that a test knows what is predicted."""

    def __init__(self, registry: Registry, **rates: float) -> None:
        self._registry, self._rates = registry, rates

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        await self._registry.register(replace(record, load=self._told(record.load)), again)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        await self._registry.heartbeat(worker_id, incarnation, state, self._told(load))

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        await self._registry.deregister(worker_id, incarnation)

    async def snapshot(self) -> Any:
        return await self._registry.snapshot()

    async def close(self) -> None:
        await self._registry.close()

    def _told(self, load: Load) -> Load:
        rates: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "step_ms": 0.0, "fixed_step_ms": 0.0}
        rates |= {"prefill_token_us": 0.0, "prefill_pair_ns": 0.0, "transfer_bytes_per_s": 1e12, "chunk_tokens": 256}
        return replace(load, **(rates | self._rates))


@asynccontextmanager
async def splitting(
    prefill: Engine | None = None, decode: Engine | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """A stack whose prompts of 256 tokens and more are split."""
    async with stack(disaggregate="auto") as made:
        told = Telling(made.router.registry)
        await made.add_prefill(prefill, through=told, chunk_tokens=256)
        await made.add_decode(decode, through=told, **settings)
        yield made


def attempts(completion: Completion) -> tuple[AttemptRecord, ...]:
    assert completion.record is not None
    return completion.record.history


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, ONE], ids=["greedy", "sampled", "one token"])
async def test_a_split_prompt_has_the_answer_of_one_process_bit_for_bit(params: SamplingParams) -> None:
    async with splitting() as made:
        for length in (256, 301, 400):
            ids = prompt(length, seed=length)
            answer = await made.ask(ids, params)
            again = await made.ask(ids, params)  # with what both have kept of it
            async with stack() as other:
                await other.add_prefill()
                await other.add_decode()
                handed = await other.ask(ids, params)
            assert answer.ids == again.ids == handed.ids == alone(ids, params).ids
            assert answer.logprobs == again.logprobs == handed.logprobs
            (attempt,) = attempts(answer)
            assert attempt.placement == "split" and attempt.placement_reason == "cheaper"
            assert 128 <= attempt.handoff_tokens <= length - 128
            assert attempt.computed_tokens == length and attempt.sent_tokens == attempt.handoff_tokens
            assert answer.usage is not None and answer.usage.cached_prompt_tokens == 0
        status = await made.client.status()
        assert 3 <= status.placement.split <= status.placement.handed_over


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_the_end_is_one_layer_behind_the_beginning(layer: int) -> None:
    model = engine()
    ids = prompt(300, seed=5)
    async with splitting(model) as made:
        (worker,) = made.decodes
        with model.held(layer):  # after K and V of that layer, which travel
            asking = asyncio.create_task(made.ask(ids, GREEDY))
            await model.inside.wait()
            await made.until(lambda: done(worker) == [layer + 1])
            (sequence,) = worker.pipeline.sequences
            assert sequence.awaits_handoff  # so that no token may be given out yet
        answer = await asking
        assert answer.ids == alone(ids, GREEDY).ids
        (attempt,) = attempts(answer)
        assert attempt.placement == "split" and attempt.computed_tokens == len(ids)


async def test_several_split_prompts_and_their_streams_at_once() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, seed=0)
    async with splitting(engine(pages=512), engine(pages=512)) as made:
        ids = [prompt(260 + 31 * n, seed=n) for n in range(5)]
        answers = await asyncio.gather(*(made.ask(each, params) for each in ids))
        for each, answer in zip(ids, answers, strict=True):
            assert answer.ids == alone(each, params).ids
        assert any(attempt.placement == "split" for answer in answers for attempt in attempts(answer))


async def test_several_outputs_of_a_split_prompt_are_those_of_a_handoff() -> None:
    ids = prompt(280, seed=4)
    async with splitting() as made:
        split = await made.ask(ids, SAMPLED, n=3)
        assert [attempt.placement for attempt in attempts(split)] == ["split"]
    async with stack() as made:
        await made.add_prefill()
        await made.add_decode()
        handed = await made.ask(ids, SAMPLED, n=3)
    assert [choice.ids for choice in split.choices] == [choice.ids for choice in handed.choices]


async def test_an_answer_goes_on_elsewhere_after_a_split_prompt() -> None:
    params = SamplingParams(temperature=0, max_tokens=150, seed=0)
    ids = prompt(290, seed=9)
    async with splitting() as made:
        await made.add_decode(through=Telling(made.router.registry))
        got = await ends_elsewhere(made, ids, params)
        expected = alone(ids, params).ids
        assert expected[-len(got) :] == got and len(got) >= 148  # `streaming` has read the first ones


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_prefill_worker_that_dies_in_any_layer_leaves_the_whole_prompt_to_decode(layer: int) -> None:
    model, ids = engine(), prompt(300, seed=6)
    async with splitting(model) as made:
        (worker,), (decode,) = made.prefills, made.decodes
        with model.held(layer):
            asking = asyncio.create_task(made.ask(ids, GREEDY))
            await model.inside.wait()
            await made.until(lambda: done(decode) == [layer + 1])
            await worker._server.stop(0.0)
        answer = await asking
        assert answer.ids == alone(ids, GREEDY).ids
        first, second = attempts(answer)
        assert (first.placement, second.placement, second.computed_tokens) == ("split", "decode", len(ids))
        assert decode.pipeline._count == 1  # on the same stream
        await made.remove(worker)


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_client_that_leaves_in_any_layer_leaves_nothing_behind(layer: int) -> None:
    model = engine()
    async with splitting(model) as made:
        with model.held(layer):
            asking = asyncio.create_task(made.ask(prompt(300, seed=7), GREEDY))
            await model.inside.wait()
            await made.until(lambda: done(made.decodes[0]) == [layer + 1])
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await made.check_free()
        ids = prompt(300, seed=8)
        assert (await made.ask(ids, GREEDY)).ids == alone(ids, GREEDY).ids


class Holding(WatchedEngine):
    """Can be held before the first layer of a tail."""

    def begin(self, plan: StepPlan) -> LayeredStep:
        self._loop.call_soon_threadsafe(self.inside.set)
        assert self._open.wait(WAIT_S), "the test never let go"
        return super().begin(plan)


async def test_a_client_that_leaves_while_the_decode_worker_computes_the_end() -> None:
    model = Holding(tiny_model(), EngineConfig(pages=128, page_size=4, deterministic=True))
    async with splitting(decode=model) as made:
        (worker,) = made.decodes
        with model.held():
            asking = asyncio.create_task(made.ask(prompt(300, seed=7), GREEDY))
            await model.inside.wait()
            accounts = worker.accounts()
            assert not accounts.fault and accounts.pages_held
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await made.until(lambda: not worker.pipeline.count)
            accounts = worker.accounts()
            assert not accounts.fault and accounts.pages_held  # by the step alone
            assert not worker.pipeline.quiet.is_set()
        await made.check_free()
        assert worker.pipeline.quiet.is_set()


def done(worker: DecodeWorker) -> list[int]:
    """Layers that are done of the end of each prompt."""
    return [sequence.tail.done for sequence in worker.pipeline.sequences if sequence.tail is not None]
