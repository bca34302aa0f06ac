"""What reaches decode: bit for bit what one process computes, over real gRPC, into other pages."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.engine.plan import StepCounters
from tests.engine.tiny import prompt, tiny_engine
from tests.prefill_worker.rig import check_equal, gated_engine, local, rig

# pages of 4 on one side and 8 on the other, chunks of 16: one around each border
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50)


@pytest.mark.parametrize("length", LENGTHS)
async def test_cache_and_logits_arrive_as_one_process_computes_them(length: int) -> None:
    ids = prompt(length)
    async with rig() as made:
        response, handoff = await made.run(ids)
        check_equal(made, handoff, local(tiny_engine(deterministic=True), ids))
        assert made.decode.received[handoff].logits.position == length - 1
        spec = made.worker.engine.spec
        payload = length * spec.layers * 2 * spec.kv_heads * spec.head_dim * 4
        assert response.bytes_sent == payload + spec.vocab_size * 4
        assert made.decode.received[handoff].report.payload_bytes == payload
        assert (response.computed_tokens, response.cached_tokens, response.sent_tokens) == (length, 0, length)
        assert response.chunks == -(-length // 16)
        assert response.frames_sent == made.decode.received[handoff].report.frames >= 2 * spec.layers
        assert response.queued_ms >= 0 and response.prefill_ms > 0 and response.transfer_ms > 0


@pytest.mark.parametrize("dtype", ["bf16", "float64"])
@pytest.mark.parametrize("orders", [("nhd", "hnd"), ("hnd", "hnd")])
async def test_fast_kernels_in_the_same_chunks_arrive_bit_equal(dtype: str, orders: tuple[str, str]) -> None:
    ids = prompt(37)
    prefill = tiny_engine(dtype=dtype, axis_order=orders[0])
    decode = tiny_engine(dtype=dtype, axis_order=orders[1], page_size=5)
    async with rig(prefill=prefill, decode=decode) as made:
        _, handoff = await made.run(ids)
        check_equal(made, handoff, local(tiny_engine(dtype=dtype, axis_order=orders[0]), ids, chunk_tokens=16))
        wide = "float64" if dtype == "float64" else "fp32"
        assert made.decode.received[handoff].logits.dtype == wide


@pytest.mark.parametrize("length", [8, 9, 16, 21])
async def test_a_warm_prefix_is_not_computed_again_and_changes_nothing(length: int) -> None:
    ids = prompt(length)
    async with rig() as made:
        cold, first = await made.run(ids)
        warm, second = await made.run(ids)
        expected = local(tiny_engine(deterministic=True), ids)
        check_equal(made, first, expected)
        check_equal(made, second, expected)
        reused = (length - 1) // 4 * 4  # whole pages, and never the last token
        assert (cold.cached_tokens, warm.cached_tokens) == (0, reused)
        assert (warm.computed_tokens, warm.sent_tokens) == (length - reused, length)


async def test_the_engine_really_runs_only_the_tokens_that_are_new() -> None:
    counters: list[StepCounters] = []
    engine = tiny_engine(deterministic=True)
    step = engine.step

    def counted(*args: object, **options: object) -> object:
        output = step(*args, **options)  # type: ignore[arg-type]
        counters.append(output.counters)
        return output

    engine.step = counted  # type: ignore[method-assign, assignment]
    async with rig(prefill=engine) as made:
        await made.run(prompt(16))
        cold = sum(c.positions for c in counters)
        counters.clear()
        await made.run((*prompt(16), 5, 6, 7))
        assert (cold, sum(c.positions for c in counters)) == (16 * 3, 3 * 3)


async def test_no_tenant_finds_what_another_computed() -> None:
    async with rig() as made:
        await made.run(prompt(20), tenant="a")
        other, _ = await made.run(prompt(20), tenant="b")
        same, _ = await made.run(prompt(20), tenant="a")
        assert (other.cached_tokens, same.cached_tokens) == (0, 16)


async def test_tokens_of_an_earlier_attempt_are_computed_after_the_prompt() -> None:
    ids, output = prompt(13), prompt(6, seed=1)
    async with rig() as made:
        response, handoff = await made.run(ids, output=output)
        check_equal(made, handoff, local(tiny_engine(deterministic=True), (*ids, *output)))
        assert response.sent_tokens == 19


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("held", [8, 24])
async def test_what_decode_holds_does_not_travel(held: int, warm: bool) -> None:
    """Held tokens below, inside and above the worker's own cached prefix of 16."""
    ids = prompt(30)
    async with rig() as made:
        if warm:
            await made.run(ids[:17])
        response, handoff = await made.run(ids, held=held)
        check_equal(made, handoff, local(tiny_engine(deterministic=True), ids), start=held)
        assert response.sent_tokens == 30 - held
        assert response.cached_tokens == (16 if warm else 0)


async def test_logits_only_sends_no_cache() -> None:
    ids = prompt(21)
    async with rig() as made:
        response, handoff = await made.run(ids, logits_only=True)
        assert made.decode.received[handoff].logits.data == local(tiny_engine(deterministic=True), ids).logits
        assert (response.sent_tokens, response.frames_sent) == (0, 0)
        assert response.bytes_sent == 97 * 4
        assert made.worker.record().load.transfer_bytes_per_s == 0


async def test_prompts_share_steps_and_none_changes_another() -> None:
    prompts = [prompt(length, seed=length) for length in (50, 3, 41, 16, 29, 7)]
    async with rig(max_running=4) as made:
        done = await asyncio.gather(*(made.run(ids) for ids in prompts))
        for ids, (response, handoff) in zip(prompts, done, strict=True):
            check_equal(made, handoff, local(tiny_engine(deterministic=True), ids))
            assert response.computed_tokens == len(ids)
        # 146 tokens in steps of 16 are at least 10; one after the other they would take 13.
        load = made.worker.record().load
        assert load.steps < sum(-(-len(ids) // 16) for ids in prompts)
        assert load.transfer_bytes_per_s > 0 and load.prefill_token_us > 0  # what placement predicts with
        assert load.step_ms == 0  # nothing runs


async def test_the_first_layers_arrive_while_later_ones_are_computed() -> None:
    """Push is layer by layer: frames of layer 0 are written while the engine still stands in layer 0."""
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        running = asyncio.ensure_future(made.run(prompt(10)))
        async with asyncio.timeout(5):
            await engine.reached.wait()
            await made.decode.writing.wait()
        assert engine.layers_run == 1
        engine.open()
        _, handoff = await running
        check_equal(made, handoff, local(tiny_engine(deterministic=True), prompt(10)))
