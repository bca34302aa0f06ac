"""Who computes a prompt: `disaggregate` in the whole service, and what the records say of each decision."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.client.events import Completion
from pdserve.errors import Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.events import AttemptRecord
from router.gate import Member
from router.jobs import Job
from tests.e2e.stack import Stack, alone, ends_elsewhere, pair, stack
from tests.e2e.watched import engine
from tests.engine.tiny import prompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0)
SAMPLED = SamplingParams(seed=77, max_tokens=8, temperature=1.1, top_p=0.9, repetition_penalty=1.2, logprobs=2)


def attempts(completion: Completion) -> tuple[AttemptRecord, ...]:
    assert completion.record is not None
    return completion.record.history


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_never_equals_the_handoff_and_one_process_bit_for_bit(params: SamplingParams) -> None:
    for length in (1, 5, 16, 17, 40):
        ids = prompt(length, seed=length)
        async with pair() as made:
            handed = await made.ask(ids, params)
        async with stack(disaggregate="never") as made:
            await made.add_decode(chunk_tokens=16)
            cold = await made.ask(ids, params)
            warm = await made.ask(ids, params)
        assert cold.ids == warm.ids == handed.ids == alone(ids, params).ids
        assert cold.logprobs == warm.logprobs == handed.logprobs
        (attempt,) = attempts(cold)
        assert (attempt.placement, attempt.placement_reason) == ("decode", "only")
        assert attempt.prefill_worker == attempt.decode_worker == "d0"
        assert (attempt.computed_tokens, attempt.sent_tokens, attempt.bytes_sent) == (length, 0, 0)
        assert cold.usage is not None and cold.usage.cached_prompt_tokens == 0
        assert warm.record is not None
        found = (length - 1) // 4 * 4  # whole pages, and never the last token
        assert warm.usage is not None and warm.usage.cached_prompt_tokens == found
        assert (warm.record.computed_tokens, warm.record.sent_tokens) == (length - found, 0)


async def test_never_serves_without_a_prefill_pool_and_always_does_not() -> None:
    async with stack() as made:
        await made.add_decode()
        with pytest.raises(Unavailable) as refused:
            await made.ask(prompt(5), GREEDY)
        assert refused.value.reason == "NO_PREFILL_WORKER"
    async with stack(disaggregate="never") as made:
        with pytest.raises(Unavailable) as refused:
            await made.ask(prompt(5), GREEDY)
        assert refused.value.reason == "NO_WORKER"
        await made.add_prefill()
        with pytest.raises(Unavailable) as refused:
            await made.ask(prompt(5), GREEDY)
        assert refused.value.reason == "NO_DECODE_WORKER"


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_auto_falls_back_when_no_prefill_pool_is_there_or_is_left(max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    async with stack(disaggregate="auto") as made:
        await made.add_decode()
        ids = prompt(21)
        alone_first = await made.ask(ids, params)
        worker = await made.add_prefill()
        with_pool = await made.ask(prompt(22), params)
        await made.remove(worker)
        left = await made.ask(prompt(23), params)
        assert alone_first.ids == alone(ids, params).ids and left.ids == alone(prompt(23), params).ids
        assert with_pool.ids == alone(prompt(22), params).ids
        assert [attempts(c)[0].placement_reason for c in (alone_first, left)] == ["only", "only"]
        assert attempts(with_pool)[0].placement_reason in ("cheaper", "unmeasured")
        status = await made.client.status()
        assert status.placement.disaggregate == "auto" and status.placement.fallbacks == 2
        assert {w.worker_id: w.takes_prompts for w in status.workers} == {"d0": True}


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_a_prefill_worker_that_dies_under_auto_leaves_its_prompt_to_the_decode_worker(max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    ids = prompt(40, seed=3)
    async with stack(disaggregate="auto") as made:
        model = engine()
        worker = await made.add_prefill(model)
        decode = await made.add_decode()
        slow = make_busy(made, "d0", 200)
        with model.held():
            asking = asyncio.create_task(made.ask(ids, params))
            await model.inside.wait()
            await worker._server.stop(0.0)
        answer = await asking
        assert answer.ids == alone(ids, params).ids
        first, second = attempts(answer)
        assert (first.placement, first.prefill_worker, first.failed_worker) == ("handoff", "p0", "p0")
        assert (second.placement, second.placement_reason, second.prefill_worker) == ("decode", "refused", "d0")
        assert second.computed_tokens == len(ids) and second.outcome == "length"
        assert decode.pipeline._count == 1  # on the same stream
        assert (await made.client.status()).placement.fallbacks == 1
        let_go(made, slow)
        await made.remove(worker)


async def test_a_stream_whose_worker_died_goes_on_where_prompt_and_output_are_computed_again() -> None:
    params = SamplingParams(temperature=0, max_tokens=120, seed=0)
    ids = prompt(30, seed=4)
    async with stack(disaggregate="never") as made:
        await made.add_decode()
        await made.add_decode()
        got = await ends_elsewhere(made, ids, params)
        expected = alone(ids, params).ids
        assert expected[-len(got) :] == got and len(got) >= 118  # `streaming` has read the first ones


async def test_auto_takes_the_decode_worker_when_the_prefill_pool_is_full_and_the_record_has_both_times() -> None:
    async with stack(disaggregate="auto") as made:
        model = engine()
        await made.add_prefill(model)
        await made.add_decode()
        for n in range(3):  # both have rates then
            await made.ask(prompt(40, seed=n), GREEDY)
            await made.router.pool.refresh()
        slow = make_busy(made, "d0", 200)
        with model.held():
            waiting = asyncio.create_task(made.ask(prompt(100, seed=8), GREEDY))
            await model.inside.wait()
            let_go(made, slow)
            queue = make_busy(made, "p0", 1000, 50)  # as if this router had so many shorter prompts there
            answer = await made.ask(prompt(60, seed=9), GREEDY)
        await waiting
        (attempt,) = attempts(answer)
        assert attempt.placement == "decode" and attempt.prefill_worker == "d0"
        assert 0 < attempt.predicted_decode_ms < attempt.predicted_handoff_ms
        assert attempts(waiting.result())[0].placement == "handoff"
        assert answer.ids == alone(prompt(60, seed=9), GREEDY).ids
        let_go(made, queue)


async def test_prompts_that_are_given_up_at_decode_leave_nothing() -> None:
    async with stack(disaggregate="never") as made:
        model = engine(pages=64)
        worker = await made.add_decode(model, chunk_tokens=8)
        with model.held():
            tasks = [asyncio.create_task(made.ask(prompt(90, seed=n), GREEDY)) for n in range(4)]
            await model.inside.wait()
            await made.until(lambda: worker.pipeline.count == 4)
            for task in tasks[:3]:
                task.cancel()
            await asyncio.gather(*tasks[:3], return_exceptions=True)
        answer = await tasks[3]
        assert answer.ids == alone(prompt(90, seed=3), GREEDY).ids


async def test_streams_and_prompts_share_the_steps_of_one_worker() -> None:
    """More than its pages hold, so that some are preempted: every answer is that of one process."""
    params = SamplingParams(temperature=0, max_tokens=24, seed=0)
    prompts = [prompt(10 + 13 * n, seed=n) for n in range(6)]
    async with stack(disaggregate="never") as made:
        model = engine(pages=56)
        worker = await made.add_decode(model, chunk_tokens=16, step_ms=0.0)
        answers = await asyncio.gather(*(made.ask(ids, params) for ids in prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.ids == alone(ids, params).ids
        sizes = [sum(len(c.ids) for c in step.plan.chunks if len(c.ids) > 1) for step in model.steps]
        assert max(sizes) <= 16 + worker.settings.recompute_tokens
        assert any(len(step.plan.chunks) > 1 for step in model.steps)


def member(made: Stack, worker_id: str) -> Member:
    return next(m for m in made.router.pool.members() if m.id == worker_id)


def make_busy(made: Stack, worker_id: str, count: int, prompt_tokens: int = 0) -> list[Job]:
    """As if this router had given it so many prompts, or (0) streams, which no report of the worker contains yet."""
    jobs = [made.router.pool.begin(member(made, worker_id), prompt_tokens, 0) for _ in range(count)]
    for job in jobs:
        job.started = float("inf")
    return jobs


def let_go(made: Stack, jobs: list[Job]) -> None:
    for job in jobs:
        made.router.pool.end(job)
