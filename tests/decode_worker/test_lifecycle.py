"""Requests through the real services: equal to one process, whatever way they take."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.plan import EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.request import SamplingParams
from pdserve.rpc.events import LENGTH, STOP, Usage
from tests.decode_worker.rig import local, rig
from tests.engine.tiny import prompt, seven_model, spec, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=10, seed=0)
SEEDED = SamplingParams(
    seed=2**64 - 3, max_tokens=12, temperature=1.3, top_p=0.95, top_k=60, min_p=0.001, repetition_penalty=1.2,
    presence_penalty=0.4, frequency_penalty=0.3, logit_bias={3: 2.0}, logprobs=3,
)  # fmt: skip


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_equal_to_one_process_around_page_boundaries(params: SamplingParams) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 3, 4, 5, 8, 9, 31)]
    expected = local(prompts, params)
    async with rig() as r:
        for ids, wanted in zip(prompts, expected, strict=True):
            cold = await r.generate(ids, params)
            warm = await r.generate(ids, params)
            for got in (cold, warm):
                assert got.ids == wanted.ids
                assert got.logprobs == wanted.tokens.logprobs
                assert got.finish is not None and got.finish.reason == LENGTH
                assert got.finish.usage == Usage(len(ids), 10 if params is GREEDY else 12)


async def test_a_batch_of_streams_equals_one_by_one() -> None:
    prompts = [prompt(5 + 3 * n, seed=n) for n in range(8)]
    each = [replace(SEEDED, seed=n, max_tokens=5 + n) for n in range(8)]
    expected = [local([ids], params)[0] for ids, params in zip(prompts, each, strict=True)]
    async with rig(decode=tiny_engine(deterministic=True, pages=128), max_batch=5) as r:
        answers = await asyncio.gather(*(r.generate(i, p) for i, p in zip(prompts, each, strict=True)))
        assert [a.ids for a in answers] == [w.ids for w in expected]
        assert [a.logprobs for a in answers] == [w.tokens.logprobs for w in expected]


async def test_other_layouts_of_pages_are_converted() -> None:
    expected = local([prompt(19)], GREEDY)[0]
    decode = tiny_engine(deterministic=True, page_size=8, axis_order="nhd")
    async with rig(decode=decode) as r, r.call(prompt(19), GREEDY) as call:
        admitted = await call.admitted()
        assert {d.code for d in admitted.conversions} == {"PAGE_SIZE", "PAGE_AXIS_ORDER"}
        await r.push(admitted, r.prefill.compute(call.ids))
        assert (await call.answer()).ids == expected.ids


async def test_one_token_needs_logits_only() -> None:
    expected = local([prompt(9)], replace(SEEDED, max_tokens=1))[0]
    async with rig() as r, r.call(prompt(9), replace(SEEDED, max_tokens=1)) as call:
        admitted = await call.admitted()
        assert admitted.logits_only
        report = await r.push(admitted, r.prefill.compute(call.ids))
        assert (report.frames, report.payload_bytes) == (0, 0)
        answer = await call.answer()
        assert answer.ids == expected.ids and answer.logprobs == expected.tokens.logprobs
        assert r.worker.blocks.cached_count == 0


async def test_only_the_part_that_is_missing_travels() -> None:
    async with rig() as r:
        first = await r.generate(prompt(10), GREEDY)
        longer = (*prompt(10), *first.ids[:8], 5, 6)  # 10 + 9 tokens of it are cached: 4 pages
        assert longer[:16] == (*prompt(10), *first.ids)[:16]
        async with r.call(longer, GREEDY) as call:
            admitted = await call.admitted()
            assert admitted.ticket.held_tokens == admitted.identity.start == 16
            report = await r.push(admitted, r.prefill.compute(longer))
            assert report.sent_tokens == len(longer) - 16
            assert (await call.answer()).ids == local([longer], GREEDY)[0].ids


async def test_other_tenants_do_not_see_the_prefix() -> None:
    async with rig() as r:
        await r.generate(prompt(12), GREEDY)
        for tenant, held in (("t", 8), ("u", 0)):
            async with r.call(prompt(12), GREEDY, tenant=tenant) as call:
                assert (await call.admitted()).ticket.held_tokens == held


async def test_an_end_id_stops() -> None:
    free = local([prompt(12)], GREEDY)[0].ids
    end = free[3]
    of = spec(eos_ids=(end,))
    async with rig(decode=tiny_engine(of, deterministic=True), prefill=tiny_engine(of, deterministic=True)) as r:
        answer = await r.generate(prompt(12), GREEDY)
        assert answer.finish is not None
        assert (answer.finish.reason, answer.finish.stop_token_id) == (STOP, end)
        assert answer.ids == free[: free.index(end) + 1]
        assert (await r.generate(prompt(12), replace(GREEDY, ignore_eos=True))).ids == free
        later = await r.generate(prompt(12), replace(GREEDY, min_tokens=7))
        assert end not in later.ids[:7]


async def test_max_tokens_none_fills_the_pool() -> None:
    async with rig(decode=tiny_engine(deterministic=True, pages=6)) as r:
        answer = await r.generate(prompt(5), replace(GREEDY, max_tokens=None))
        assert len(answer.ids) == 6 * 4 - 5 + 1


@pytest.mark.parametrize("done", [1, 4, 9])
@pytest.mark.parametrize("forwarded", [0, None])
async def test_a_resumed_output_continues_as_if_never_interrupted(done: int, forwarded: int | None) -> None:
    params = replace(SEEDED, max_tokens=10, logprobs=None)
    whole = local([prompt(11)], params)[0].ids
    async with rig() as r:
        answer = await r.generate(prompt(11), params, output=whole[:done], forwarded=forwarded)
        assert answer.ids == (whole[done:] if forwarded is None else whole)
        assert answer.batches[0].first_index == (done if forwarded is None else 0)
        assert answer.finish is not None and answer.finish.usage.output_tokens == 10


async def test_an_output_that_had_ended_needs_no_cache() -> None:
    whole = local([prompt(11)], GREEDY)[0].ids
    async with rig() as r, r.call(prompt(11), GREEDY, output=whole, forwarded=8) as call:
        answer = await call.answer()
        assert answer.ids == whole[8:]
        assert answer.finish is not None and answer.finish.reason == LENGTH


async def test_the_seven_decoder_through_a_real_handoff() -> None:
    """Spec B3 and B4: ids, cache lengths after each step, and the work of both sides together."""
    config = EngineConfig(dtype="float64", pages=8, page_size=4)
    decode, prefill = Engine(seven_model(), config), Engine(seven_model(), config)
    lengths: list[int] = []
    step = decode.step

    def watched(plan: StepPlan) -> StepOutput:
        lengths.extend(chunk.start + len(chunk.ids) for chunk in plan.chunks)
        return step(plan)

    decode.step = watched  # type: ignore[method-assign, assignment]
    async with rig(decode=decode, prefill=prefill) as r:
        for tokens, ids, cached, work in (
            (4, (3, 2, 0, 4), [5, 6, 7], StepCounters(14, 112)),
            (5, (3, 2, 0, 4, 2), [5, 6, 7, 8], StepCounters(16, 144)),
        ):
            r.worker.pipeline.counters = StepCounters()
            async with r.call((0, 1, 2, 3), replace(GREEDY, max_tokens=tokens)) as call:
                admitted = await call.admitted()
                assert admitted.ticket.endpoints[0].address == r.worker.transfer_address
                computed = r.prefill.compute(call.ids)
                report = await r.push(admitted, computed)
                answer = await call.answer()
            assert answer.ids == ids
            assert report.payload_bytes == 4 * 2 * 2 * 4 * 8  # tokens, K and V, layers, head dim, float64
            assert lengths == cached
            assert computed.counters + r.worker.pipeline.counters == work
            lengths.clear()
