"""How prompts end before they are done, and that no page outlives them. Every test ends with an empty worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from pdserve.engine.cache import PagedCache
from pdserve.engine.engine import Engine
from pdserve.engine.plan import EngineConfig
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Fenced,
    Internal,
    PdserveError,
    Refused,
    Unavailable,
)
from tests.engine.tiny import prompt, tiny_engine, tiny_model
from tests.prefill_worker.rig import check_equal, gated_engine, local, rig

T = TypeVar("T")


async def soon(wait: Awaitable[T]) -> T:
    async with asyncio.timeout(5.0):
        return await wait


async def test_cancelled_in_the_queue() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1) as made:
        first = made.start(made.request(prompt(9)))
        await soon(engine.reached.wait())
        second = made.start(made.request(prompt(10)))
        await made.until_waiting(1)
        second.cancel()
        await made.until_waiting(0)
        engine.open()
        assert (await made.outcome(first)).computed_tokens == 9
        assert len(made.decode.received) == 1


async def test_cancelled_between_two_layers_of_a_chunk() -> None:
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        call = made.start(made.request(prompt(30)))
        await soon(engine.reached.wait())
        assert made.worker.blocks.held_count == 8
        call.cancel()
        await made.until_dropped()
        assert made.worker.blocks.held_count == 8  # the step may still write them
        engine.open()
        await made.idle(within_s=1.0)
        assert engine.layers_run == 1  # of three, in the first of two chunks
        assert not made.decode.received


async def test_a_prompt_that_shares_the_step_survives_the_others_cancellation() -> None:
    engine = gated_engine(stop_at=2)
    async with rig(prefill=engine) as made:
        first = made.start(made.request(prompt(60, seed=1)))
        second = made.start(made.request(prompt(40, seed=2)))
        await soon(engine.reached.wait())
        first.cancel()
        await made.until_dropped()
        engine.open()
        assert (await made.outcome(second)).sent_tokens == 40
        assert engine.layers_run == 3  # the shared step ran to its end
        expected = local(tiny_engine(deterministic=True), prompt(40, seed=2))
        check_equal(made, made.tickets[1].handoff_id, expected)


async def test_cancelled_in_the_middle_of_the_transfer() -> None:
    async with rig() as made:
        made.decode.may_write.clear()
        call = made.start(made.request(prompt(30)))
        await soon(made.decode.writing.wait())
        assert made.worker.blocks.held_count == 8
        call.cancel()
        await made.idle(within_s=1.0)
        assert not made.decode.received
        made.decode.may_write.set()


async def test_decode_refuses_to_grant() -> None:
    async with rig() as made:
        made.decode.refusal = Exhausted("no pages here", reason="NO_PAGES")
        with pytest.raises(Exhausted) as failure:
            await made.send(made.request(prompt(30)))
        assert failure.value.reason == "NO_PAGES"
        await made.idle(within_s=1.0)


@pytest.mark.parametrize(("field", "kind"), [("attempt", Refused), ("incarnation", Fenced)])
async def test_decode_does_not_know_the_ticket(field: str, kind: type[PdserveError]) -> None:
    async with rig() as made:
        request = made.request(prompt(9))
        setattr(request.ticket, field, 7 if field == "attempt" else bytes(16))
        with pytest.raises(kind):
            await made.send(request)
        await made.idle(within_s=1.0)


async def test_a_ticket_is_good_for_one_cache() -> None:
    async with rig() as made:
        request = made.request(prompt(9))
        await made.send(request)
        with pytest.raises(Fenced) as failure:
            await made.send(request)
        assert failure.value.reason == "TICKET_USED"


async def test_decode_dies_in_the_middle_of_the_transfer() -> None:
    async with rig() as made:
        made.decode.may_write.clear()
        call = made.start(made.request(prompt(30)))
        await soon(made.decode.writing.wait())
        stopping = asyncio.ensure_future(made.decode.server.stop())
        with pytest.raises((Unavailable, Cancelled)):
            await made.outcome(call)
        await made.idle(within_s=1.0)
        made.decode.may_write.set()
        await soon(stopping)


async def test_decode_was_never_there() -> None:
    async with rig() as made:
        await made.decode.server.stop()
        with pytest.raises(Unavailable) as failure:
            await made.send(made.request(prompt(30)))
        assert failure.value.retryable
        await made.idle(within_s=1.0)


async def test_a_full_queue_refuses_with_a_hint() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1, max_queue=1) as made:
        first = made.start(made.request(prompt(9)))
        await soon(engine.reached.wait())
        second = made.start(made.request(prompt(9)))
        await made.until_waiting(1)
        with pytest.raises(Exhausted) as failure:
            await made.send(made.request(prompt(9)))
        assert (failure.value.reason, failure.value.retryable) == ("QUEUE_FULL", True)
        assert failure.value.retry_after_ms > 0
        engine.open()
        await made.outcome(first)
        await made.outcome(second)


async def test_prompts_wait_for_pages_and_all_get_them() -> None:
    """Each prompt needs nine of twelve pages, so that they go one after the other; none is lost."""
    async with rig(prefill=tiny_engine(pages=12, deterministic=True)) as made:
        done = await asyncio.gather(*(made.run(prompt(33, seed=n)) for n in range(4)))
        for n, (_, handoff) in enumerate(done):
            check_equal(made, handoff, local(tiny_engine(deterministic=True), prompt(33, seed=n)))


async def test_the_tickets_time_ends_in_the_queue() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1) as made:
        first = made.start(made.request(prompt(9)))
        await soon(engine.reached.wait())
        request = made.request(prompt(10))
        request.ticket.ttl_ms = 50
        with pytest.raises(DeadlineExceeded) as failure:
            await made.send(request)
        assert (failure.value.reason, failure.value.retryable) == ("QUEUE_TIMEOUT", True)
        engine.open()
        await made.outcome(first)


async def test_the_calls_deadline_ends_the_work() -> None:
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        with pytest.raises(DeadlineExceeded):
            await made.send(made.request(prompt(30)), timeout=0.2)
        await made.until_dropped()
        engine.open()
        await made.idle(within_s=1.0)
        assert engine.layers_run == 1


async def test_a_lease_ends_though_nobody_calls() -> None:
    """Decode never grants: the reaper takes the pages back, without any traffic."""
    async with rig(lease_s=0.2) as made:
        made.decode.may_grant.clear()
        with pytest.raises(DeadlineExceeded) as failure:
            await made.send(made.request(prompt(30)))
        assert (failure.value.reason, failure.value.retryable) == ("LEASE_ENDED", True)
        await made.idle(within_s=1.0)


async def test_a_model_that_makes_nan_hands_nothing_over() -> None:
    model = tiny_model()
    model.tensors["final_norm.scale"].fill_(torch.nan)
    async with rig(prefill=Engine(model, EngineConfig(dtype="fp32", pages=64, page_size=4))) as made:
        with pytest.raises(Internal) as failure:
            await made.send(made.request(prompt(9)))
        assert failure.value.reason == "LOGITS_NOT_FINITE"
        assert not made.decode.received
        await made.idle(within_s=1.0)
        assert made.worker.blocks.cached_count == 0  # nobody finds what made it


async def test_a_layer_that_misses_a_token_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PagedCache.write

    def lossy(self: PagedCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keep = len(slots) - (layer == 1)
        write(self, layer, slots[:keep], k[:keep], v[:keep])

    async with rig() as made:
        monkeypatch.setattr(PagedCache, "write", lossy)
        with pytest.raises(Internal) as failure:
            await made.send(made.request(prompt(9)))
        assert failure.value.reason == "equal_lengths" and "layer 1 stored 8 of 9" in str(failure.value)
        assert not made.decode.received
        await made.idle(within_s=1.0)
        assert made.worker.blocks.cached_count == 0
