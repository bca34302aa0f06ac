"""Sequences that lose their pages, on a real engine: the answer is that of one that was left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import replace

import pytest

from decode_worker.sequence import Sequence, State
from decode_worker.step import DecodePlan
from pdserve.errors import DeadlineExceeded, Unavailable
from pdserve.local import LocalOutput, LocalRunner
from pdserve.request import SamplingParams
from pdserve.rpc.events import STOP
from pdserve.tokenizer import Bundle
from pdserve.v1 import worker_pb2
from tests.decode_worker.rig import Answer, Rig, rig
from tests.decode_worker.small_bundle import small_bundle
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=0)
SHAPED = SamplingParams(
    seed=11, max_tokens=20, temperature=1.3, top_p=0.95, top_k=60, repetition_penalty=1.2, presence_penalty=0.4,
    frequency_penalty=0.3, min_tokens=3, logprobs=3,
)  # fmt: skip
BUNDLE = small_bundle()


def undisturbed(
    prompts: Series[Series[int]], params: SamplingParams, dtype: str = "fp32", bundle: Bundle | None = None
) -> list[LocalOutput]:
    """One process, each prompt alone, pages enough."""
    runner = LocalRunner(tiny_engine(dtype=dtype, deterministic=True), bundle, chunk_tokens=6)
    return [runner.generate_batch([ids], params)[0] for ids in prompts]


def check(answer: Answer, wanted: LocalOutput) -> None:
    assert answer.ids == wanted.ids and answer.text == wanted.text
    assert answer.logprobs == wanted.tokens.logprobs
    assert answer.finish == wanted.finish


@contextmanager
def preempting(r: Rig, at: Series[int], done: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Before the plans of these numbers the only running sequence loses its pages, and the index forgets them.

    Only what growth would do is done here, where growth would do it: between two steps.
    """
    scheduler, count = r.worker.pipeline.scheduler, 0
    plan = scheduler.plan

    def disturbed() -> DecodePlan:
        nonlocal count
        running = [s for s in scheduler.running if s.pages]
        if running:
            if count in at:
                scheduler._memory.preempt(running[0])
                r.worker.blocks.allocate("x", r.worker.blocks.available_count)
                r.worker.blocks.release("x")
                done()
            count += 1
        return plan()

    scheduler.plan = disturbed  # type: ignore[method-assign]
    try:
        yield
    finally:
        scheduler.plan = plan  # type: ignore[method-assign]
        assert count > max(at)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("params", [GREEDY, SHAPED], ids=["greedy", "shaped"])
@pytest.mark.parametrize(
    "at", [(0,), (1,), (9,), (3, 4), (0, 1), (2, 3, 12)], ids=lambda at: "plan " + " and ".join(map(str, at))
)
async def test_equal_bits_wherever_it_is_preempted(dtype: str, params: SamplingParams, at: tuple[int, ...]) -> None:
    """Before its first token, in the middle, twice, and while it computes its tokens again."""
    [wanted] = undisturbed([prompt(13)], params, dtype)
    decode, prefill = (tiny_engine(dtype=dtype, deterministic=True) for _ in range(2))
    async with rig(decode=decode, prefill=prefill, recompute_tokens=5) as r:
        with preempting(r, at):
            check(await r.generate(prompt(13), params), wanted)
        scheduler = r.worker.pipeline.scheduler
        assert scheduler.counters.preemptions == len(at) and scheduler.recomputed_tokens >= 13


@pytest.mark.parametrize("at", [(0,), (5,), (11,), (12, 14)], ids=str)
async def test_stop_strings_and_characters_cut_by_a_preemption(at: tuple[int, ...]) -> None:
    free = undisturbed([prompt(9)], replace(SHAPED, logprobs=None), bundle=BUNDLE)[0]
    stop = free.text[10:14].decode(errors="replace")
    params = replace(SHAPED, stop=(stop,))
    [wanted] = undisturbed([prompt(9)], params, bundle=BUNDLE)
    assert wanted.finish.reason == STOP
    async with rig(bundle=BUNDLE, recompute_tokens=4) as r:
        with preempting(r, at):
            check(await r.generate(prompt(9), params), wanted)


async def test_a_resumed_output_may_be_preempted() -> None:
    """Output of another worker is part of what is computed again."""
    params = replace(SHAPED, logprobs=None)
    [wanted] = undisturbed([prompt(9)], params)
    async with rig(recompute_tokens=4) as r:
        with preempting(r, (0, 5)):
            answer = await r.generate(prompt(9), params, output=wanted.ids[:7])
        assert answer.ids == wanted.ids[7:] and answer.finish == wanted.finish


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_six_requests_in_a_pool_for_two_all_finish(dtype: str) -> None:
    """Caches in transfer and the growth to come count at admission, and nobody stalls half-way."""
    prompts = [prompt(9 + n % 3, seed=n) for n in range(6)]
    wanted = undisturbed(prompts, SHAPED, dtype)
    decode = tiny_engine(dtype=dtype, deterministic=True, pages=16)  # a whole request takes eight
    prefill = tiny_engine(dtype=dtype, deterministic=True, pages=64)
    async with rig(decode=decode, prefill=prefill, growth_watermark=0.0, recompute_tokens=6) as r:
        answers = await asyncio.gather(*(r.generate(ids, SHAPED) for ids in prompts))
        for answer, expected in zip(answers, wanted, strict=True):
            check(answer, expected)
        assert r.worker.pipeline.scheduler.counters.preemptions > 0
        accounts = await r.about.Accounts(worker_pb2.AccountsRequest())
        assert accounts.preemptions == r.worker.pipeline.scheduler.counters.preemptions
        assert accounts.recomputed_tokens == r.worker.pipeline.scheduler.recomputed_tokens > 0
        assert accounts.intact


async def test_a_watermark_spares_work() -> None:
    """Six requests again: with room kept for growth nobody loses pages, and all finish as well."""
    prompts = [prompt(9, seed=n) for n in range(6)]
    wanted = undisturbed(prompts, GREEDY)
    async with rig(decode=tiny_engine(deterministic=True, pages=16), growth_watermark=0.6) as r:
        answers = await asyncio.gather(*(r.generate(ids, GREEDY) for ids in prompts))
        assert [a.ids for a in answers] == [w.ids for w in wanted]
        assert r.worker.pipeline.scheduler.counters.preemptions == 0


async def test_the_answer_to_a_whole_pool_waits_for_the_others_and_finishes() -> None:
    params = replace(GREEDY, max_tokens=None)
    async with rig(decode=tiny_engine(deterministic=True, pages=8)) as r:
        small = [r.generate(prompt(5, seed=n), replace(GREEDY, max_tokens=12)) for n in range(3)]
        whole, *_ = await asyncio.gather(r.generate(prompt(6), params), *small)
        assert len(whole.ids) == 8 * 4 - 6 + 1


class Blocked:
    """Somebody else has all the pages, so that what was preempted stays so."""

    def __init__(self, r: Rig) -> None:
        self._r = r

    def take(self) -> None:
        self._r.worker.blocks.allocate("x", self._r.worker.blocks.available_count)

    def free(self) -> None:
        self._r.worker.blocks.release("x")


@pytest.mark.parametrize("how", ["cancelled", "expired", "drained"])
@pytest.mark.parametrize("first", [True, False], ids=["before its first token", "later"])
async def test_the_end_of_one_that_waits_for_its_pages(how: str, first: bool) -> None:
    async with rig(generate_s=0.6 if how == "expired" else 60.0) as r:
        blocked = Blocked(r)
        with preempting(r, (0 if first else 5,), blocked.take):
            async with r.call(prompt(9), replace(GREEDY, max_tokens=80)) as call:
                await r.push(await call.admitted(), r.prefill.compute(call.ids))
                await r.states.wait(State.PREEMPTED)
                [sequence] = r.worker.pipeline.sequences
                assert sequence.pages == () and r.worker.pipeline.count == 1
                if how == "expired":
                    with pytest.raises(DeadlineExceeded):
                        await call.answer()
                elif how == "drained":
                    draining = asyncio.create_task(r.worker.drain(0.0))
                    with pytest.raises(Unavailable):
                        await call.answer()
                    async with asyncio.timeout(WAIT_S):
                        await draining
            async with asyncio.timeout(1.0):
                await r.worker.pipeline.quiet.wait()
            blocked.free()


async def test_one_that_waits_for_its_pages_is_in_the_accounts() -> None:
    async with rig() as r:
        blocked = Blocked(r)
        with preempting(r, (2,), blocked.take):
            async with r.call(prompt(9), GREEDY) as call:
                await r.push(await call.admitted(), r.prefill.compute(call.ids))
                await r.states.wait(State.PREEMPTED)
                blocked.free()  # but nothing wakes the loop
                accounts = await r.about.Accounts(worker_pb2.AccountsRequest())
                [holding] = accounts.holdings
                assert (holding.owner, holding.kind, holding.pages) == ("r#1", "preempted", 0)
                assert accounts.intact and 0 < holding.deadline_left_s <= r.worker.settings.generate_s
                r.worker.pipeline._wake.set()
                answer = await call.answer()
        assert answer.ids == undisturbed([prompt(9)], GREEDY)[0].ids


@pytest.mark.parametrize("how", ["cancelled", "expired", "drained"])
async def test_the_end_of_one_that_computes_its_tokens_again(how: str) -> None:
    decode = engine()
    params = replace(GREEDY, max_tokens=80)
    async with rig(decode=decode, recompute_tokens=4, generate_s=0.8 if how == "expired" else 60.0) as r:
        opened = decode.held()

        def hold() -> None:
            opened.__enter__()

        with preempting(r, (6,), hold):
            async with r.call(prompt(9), params) as call:
                await r.push(await call.admitted(), r.prefill.compute(call.ids))
                async with asyncio.timeout(WAIT_S):
                    await decode.inside.wait()
                [sequence] = r.worker.pipeline.sequences
                assert recomputing(sequence) and sequence.stepping and r.worker.blocks.held_count
                draining = None
                if how == "expired":
                    with pytest.raises(DeadlineExceeded):
                        await call.answer()
                elif how == "drained":
                    draining = asyncio.create_task(r.worker.drain(0.0))
                    with pytest.raises(Unavailable):
                        await call.answer()
                else:
                    call.call.cancel()
                    await r.describe_until(lambda: sequence.ending is not None)
                assert r.worker.blocks.held_count  # the step writes them still
                opened.__exit__(None, None, None)
                if draining is not None:
                    async with asyncio.timeout(WAIT_S):
                        await draining
        await r.empty()
        last = decode.steps[-1].plan.chunks
        assert [chunk.logits for chunk in last] == ["none"]  # no further chunk was begun


def recomputing(sequence: Sequence) -> bool:
    return sequence.state is State.DECODING and sequence.length - sequence.cached > 4


async def test_others_go_on_while_one_computes_its_tokens_again() -> None:
    """Chunks of one and single tokens of the other share a step, and both are right."""
    decode = engine()
    params = replace(GREEDY, max_tokens=40)
    wanted = undisturbed([prompt(30), prompt(5, seed=1)], params)
    async with rig(decode=decode, recompute_tokens=3) as r:
        with preempting(r, (4,)):
            answers = await asyncio.gather(r.generate(prompt(30), params), r.generate(prompt(5, seed=1), params))
        assert [a.ids for a in answers] == [w.ids for w in wanted]
    mixed = [step.plan.chunks for step in decode.steps if len(step.plan.chunks) == 2]
    assert any({len(chunk.ids) for chunk in chunks} == {1, 3} for chunks in mixed)
