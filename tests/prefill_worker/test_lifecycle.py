"""How prompts end before they are done, and that no page outlives them. Every test ends with an empty worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import pytest
import torch

from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Exhausted,
    Fenced,
    Internal,
    PdserveError,
    Refused,
    Unavailable,
)
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import prefill_pb2
from prefill_worker.scheduler import State
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.engine.tiny import prompt, tiny_engine
from tests.prefill_worker.rig import Rig, check_equal, gated_engine, local, rig

T = TypeVar("T")


async def soon(wait: Coroutine[Any, Any, T], within_s: float = 5.0) -> T:
    return await asyncio.wait_for(wait, within_s)


def start(made: Rig, request: prefill_pb2.RunRequest) -> Any:
    """The call, running."""
    return made.stub.Run(request, timeout=10)


async def error_of(call: Any) -> PdserveError:
    with pytest.raises(grpc.RpcError) as failure:
        await soon(call.__await__().__class__ and _awaited(call))
    return from_rpc_error(failure.value)


async def _awaited(call: Any) -> Any:
    return await call


def waiting(made: Rig) -> int:
    return made.worker.record().load.waiting


async def until_waiting(made: Rig, count: int) -> None:
    """Describes the worker over and over, through its own RPC, until so many prompts wait."""
    async with asyncio.timeout(5):
        while waiting(made) != count:
            await made.describe()


async def test_cancelled_in_the_queue() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1) as made:
        first = start(made, made.request(prompt(9)))
        await soon(engine.reached.wait())
        second = start(made, made.request(prompt(10)))
        await until_waiting(made, 1)
        second.cancel()
        await until_waiting(made, 0)
        engine.open()
        response = await soon(_awaited(first))
        assert response.computed_tokens == 9
        assert len(made.decode.received) == 1


async def test_cancelled_between_two_layers_of_a_chunk() -> None:
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        call = start(made, made.request(prompt(30)))
        await soon(engine.reached.wait())
        assert made.worker.blocks.held_count == 8
        call.cancel()
        await soon(made.dropped())
        engine.open()
        await made.idle(within_s=1.0)
        assert engine.layers_run == 1  # of three, in the first of two chunks
        await soon(made.until_aborts(1))


async def test_a_prompt_that_shares_the_step_survives_the_others_cancellation() -> None:
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        made.decode.may_grant.clear()
        first = start(made, made.request(prompt(40, seed=1)))
        await soon(engine.reached.wait())
        second = start(made, made.request(prompt(40, seed=2)))
        await until_waiting(made, 1)
        engine.open()
        await soon(made.decode.granting.wait())
        first.cancel()
        made.decode.may_grant.set()
        response = await soon(_awaited(second))
        assert response.sent_tokens == 40
        check_equal(made, made.tickets[1].handoff_id, local(tiny_engine(), prompt(40, seed=2), 16), logits=False)


async def test_cancelled_in_the_middle_of_the_transfer() -> None:
    async with rig() as made:
        made.decode.may_write.clear()
        call = start(made, made.request(prompt(30)))
        await soon(made.decode.writing.wait())
        assert made.worker.blocks.held_count == 8
        call.cancel()
        await made.idle(within_s=1.0)
        made.decode.may_write.set()
        await soon(made.until_aborts(1))
        assert not made.decode.received


async def test_decode_refuses_to_grant() -> None:
    async with rig() as made:
        made.decode.refusal = Exhausted("no pages here", reason="NO_PAGES")
        with pytest.raises(Exhausted) as failure:
            await made.send(made.request(prompt(30)))
        assert failure.value.reason == "NO_PAGES"
        await made.idle()


@pytest.mark.parametrize(("field", "kind"), [("attempt", Refused), ("incarnation", Fenced)])
async def test_decode_does_not_know_the_ticket(field: str, kind: type[PdserveError]) -> None:
    async with rig() as made:
        request = made.request(prompt(9))
        setattr(request.ticket, field, 7 if field == "attempt" else bytes(16))
        with pytest.raises(kind):
            await made.send(request)


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
        call = start(made, made.request(prompt(30)))
        await soon(made.decode.writing.wait())
        stopping = asyncio.ensure_future(made.decode.server.stop())
        error = await error_of(call)
        assert isinstance(error, Unavailable | PdserveError) and error.reason in ("UNAVAILABLE", "CANCELLED")
        await made.idle(within_s=1.0)
        made.decode.may_write.set()
        await soon(_awaited(stopping))


async def test_decode_was_never_there() -> None:
    async with rig() as made:
        await made.decode.server.stop()
        with pytest.raises(Unavailable) as failure:
            await made.send(made.request(prompt(30)))
        assert failure.value.retryable


async def test_a_full_queue_refuses_with_a_hint() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1, max_queue=1) as made:
        first = start(made, made.request(prompt(9)))
        await soon(engine.reached.wait())
        second = start(made, made.request(prompt(9)))
        await until_waiting(made, 1)
        with pytest.raises(Exhausted) as failure:
            await made.send(made.request(prompt(9)))
        assert (failure.value.reason, failure.value.retryable) == ("QUEUE_FULL", True)
        assert failure.value.retry_after_ms > 0
        engine.open()
        await soon(_awaited(first))
        await soon(_awaited(second))


async def test_prompts_wait_for_pages_and_all_get_them() -> None:
    """Each prompt needs nine of twelve pages, so that they go one after the other; none is lost."""
    async with rig(prefill=tiny_engine(pages=12, deterministic=True)) as made:
        done = await asyncio.gather(*(made.run(prompt(33, seed=n)) for n in range(4)))
        for n, (_, handoff) in enumerate(done):
            check_equal(made, handoff, local(tiny_engine(deterministic=True), prompt(33, seed=n)))


async def test_the_tickets_time_ends_in_the_queue() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, max_running=1) as made:
        first = start(made, made.request(prompt(9)))
        await soon(engine.reached.wait())
        request = made.request(prompt(10))
        request.ticket.ttl_ms = 50
        with pytest.raises(DeadlineExceeded) as failure:
            await made.send(request)
        assert (failure.value.reason, failure.value.retryable) == ("QUEUE_TIMEOUT", True)
        engine.open()
        await soon(_awaited(first))


async def test_the_calls_deadline_ends_the_work() -> None:
    engine = gated_engine()
    async with rig(prefill=engine) as made:
        with pytest.raises(DeadlineExceeded):
            await made.send(made.request(prompt(30)), timeout=0.2)
        await soon(made.dropped())
        engine.open()
        await made.idle(within_s=1.0)
        assert engine.layers_run == 1


async def test_a_lease_ends_though_nobody_calls() -> None:
    """Decode never grants: the reaper takes the pages back, without any traffic."""
    async with rig(lease_s=0.2) as made:
        made.decode.may_grant.clear()
        with pytest.raises(DeadlineExceeded) as failure:
            await made.send(made.request(prompt(30)))
        assert failure.value.retryable
        await made.idle(within_s=1.0)
        made.decode.may_grant.set()


async def test_a_model_that_makes_nan_hands_nothing_over() -> None:
    engine = tiny_engine()
    engine.decoder.head.weight.fill_(float("nan")) if hasattr(engine.decoder, "head") else None
    async with rig(prefill=engine) as made:
        with pytest.raises(Internal) as failure:
            await made.send(made.request(prompt(9)))
        assert failure.value.reason == "LOGITS_NOT_FINITE"
        assert not made.decode.received


async def test_drain_lets_running_prompts_finish_and_takes_no_new_one() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, grace_s=5.0) as made:
        call = start(made, made.request(prompt(20)))
        await soon(engine.reached.wait())
        draining = asyncio.ensure_future(made.worker.drain())
        await soon(made.until_state("draining"))
        with pytest.raises(Unavailable) as failure:
            await made.send(made.request(prompt(9)))
        assert (failure.value.reason, failure.value.retryable) == ("DRAINING", True)
        engine.open()
        response = await soon(_awaited(call))
        assert response.sent_tokens == 20
        await soon(_awaited(draining))


async def test_drain_ends_what_outlasts_the_grace_period() -> None:
    async with rig() as made:
        made.decode.may_grant.clear()
        calls = [start(made, made.request(prompt(30, seed=n))) for n in range(6)]
        await soon(made.decode.granting.wait())
        await until_waiting(made, 2)
        await soon(made.worker.drain(0.0))
        assert made.worker.blocks.held_count == 0
        for call in calls:
            error = await error_of(call)
            assert isinstance(error, Unavailable) and error.reason == "DRAINING"
        made.decode.may_grant.set()


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with rig() as made:
        port = int(made.worker.address.rsplit(":", 1)[1])
        second = PrefillWorker(tiny_engine(), None, PrefillSettings(port=port))
        with pytest.raises(ConfigError) as failure:
            await second.start()
        assert failure.value.reason == "CANNOT_BIND"


async def test_no_task_and_no_thread_outlives_a_worker() -> None:
    async with rig() as made:
        await made.run(prompt(20))
        await made.worker.stop()
        await made.worker.stop()
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not {name for name in names if name in ("loop", "reaper", "connections") or "handover" in name}
