"""Nothing lasts for ever: attempts, handoffs, requests, writes to a reader, and the way to the end."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import grpc
import pytest

from cache_transfer.contract import Ticket
from cache_transfer.wire import contract_to_proto
from decode_worker.sequence import State
from decode_worker.settings import DecodeSettings
from decode_worker.stream import EventStream
from decode_worker.worker import DecodeWorker
from pdserve.errors import ConfigError, DeadlineExceeded, Internal, PdserveError, Refused, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import READY, STALLED
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from pdserve.worker import pool_worker
from tests.decode_worker.driving import Gate, bring_to
from tests.decode_worker.rig import WAIT_S, Call, Rig, local, rig
from tests.decode_worker.small_bundle import small_bundle
from tests.engine.tiny import prompt, spec, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=80)


async def send_retry(r: Rig, call: Call) -> None:
    await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(r.prefill.contract)))


async def test_retries_do_not_renew_the_handoff_for_ever() -> None:
    async with rig(ticket_ttl_s=5.0, handoff_s=0.3) as r, r.call(prompt(9), PARAMS) as call:
        await call.admitted()
        [sequence] = r.worker.pipeline.sequences
        end = sequence.arrives_by
        for _ in range(5):
            await send_retry(r, call)
            await call.ticket()
            assert sequence.deadline == end
        with pytest.raises(DeadlineExceeded) as caught:
            await call.answer()
        assert caught.value.reason == "TICKET_EXPIRED"


async def test_a_request_has_a_number_of_attempts() -> None:
    async with rig(max_attempts=3) as r, r.call(prompt(9), PARAMS) as call:
        await call.admitted()
        for attempt in (2, 3):
            await send_retry(r, call)
            assert (await call.ticket()).attempt == attempt
        await send_retry(r, call)
        with pytest.raises(Refused) as caught:
            await call.answer()
        assert (caught.value.reason, caught.value.field) == ("TOO_MANY_ATTEMPTS", "decode.max_attempts")


async def test_a_new_ticket_takes_the_place_of_an_unread_one() -> None:
    stream = EventStream(limit=4)
    tickets = [Ticket(b"h" * 16, attempt, b"i" * 16, b"s" * 32, 1000, 0, ()) for attempt in (1, 2, 3)]
    for ticket in tickets:
        stream.put(ticket)
    assert await stream.next() == tickets[-1]
    stream.fail(Refused("over"))
    with pytest.raises(Refused):
        await stream.next()


@pytest.mark.parametrize("who", ["worker", "caller"])
async def test_a_running_request_ends_by_its_deadline(who: str) -> None:
    async with rig(generate_s=1.5 if who == "worker" else 60.0) as r:
        call = r.call(prompt(9), LONG)
        if who == "caller":
            call.call = r.stub.Generate(timeout=1.5)
        gate = Gate(r)
        await gate.closed()  # no step begins from here on
        async with call:
            await bring_to(State.VERIFIED, r, call)
            accounts = await r.about.Accounts(worker_pb2.AccountsRequest())
            [holding] = accounts.holdings
            assert holding.kind == "request" and 0 <= holding.deadline_left_s <= 1.5
            with pytest.raises(DeadlineExceeded) as caught:
                await call.answer()
            if who == "worker":
                assert (caught.value.reason, caught.value.field) == ("GENERATE_TIMEOUT", "deadline")
            await gate.open()
            await r.empty()


async def test_a_reader_with_a_closed_window_does_not_keep_the_handler() -> None:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]  # a window that stays small
    wordy = replace(PARAMS, max_tokens=400, logprobs=20)
    engine = tiny_engine(pages=256, deterministic=True)
    async with (
        rig(decode=engine, reader_s=0.2, max_unread_tokens=8) as r,
        grpc.aio.insecure_channel(r.worker.address, options=options) as narrow,
    ):
        call = r.call(prompt(9), wordy)
        call.call = decode_pb2_grpc.DecodeStub(narrow).Generate(timeout=30)
        async with call:
            await r.push(await call.admitted(), r.prefill.compute(call.ids))
            await r.describe_until(lambda: not r.worker.pipeline.sequences)
            await r.describe_until(lambda: not [t for t in asyncio.all_tasks() if "retries" in t.get_name()])
            with pytest.raises(DeadlineExceeded) as caught:
                while True:
                    await call.event()
            assert caught.value.reason == "SLOW_READER"


async def test_a_hung_engine_leaves_the_rotation_and_comes_back() -> None:
    registry = MemoryRegistry()
    slow = RegistrySettings(lease_s=3600.0, heartbeat_s=1000.0)  # so that only a renewal out of turn brings news
    async with rig(registry=registry, announced=slow, stall_s=0.1) as r, r.call(prompt(9), LONG) as call:
        await bring_to(State.DECODING, r, call)
        gate = Gate(r)
        await gate.closed()
        await r.describe_until(lambda: r.worker.stalled)
        assert r.worker.record().state == STALLED
        await until_listed(r, registry, STALLED)
        with pytest.raises(Unavailable) as caught:  # a retry elsewhere need not wait for the step
            await call.answer()
        assert (caught.value.reason, caught.value.retryable) == ("STALLED", True)
        async with r.call(prompt(9), PARAMS) as late:
            with pytest.raises(Unavailable):
                await late.event()
        await gate.open()
        await until_listed(r, registry, READY)
        assert not r.worker.stalled
        assert (await r.generate(prompt(6), PARAMS)).ids == local([prompt(6)], PARAMS)[0].ids


async def until_listed(r: Rig, registry: MemoryRegistry, state: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while [live.record.state for live in await registry.snapshot()] != [state]:
            await r.about.Describe(worker_pb2.DescribeRequest())


async def test_a_stuck_step_does_not_keep_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_worker, "SETTLE_S", 0.2)
    free, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with rig(grace_s=0.0) as r:
        call = r.call(prompt(9), LONG)
        async with call:
            engine, step = r.worker.engine, r.worker.engine.step

            def hang(*args: object, **options: object) -> object:
                loop.call_soon_threadsafe(begun.set)
                assert free.wait(WAIT_S)
                raise Internal("let go")

            engine.step = hang  # type: ignore[method-assign, assignment]
            await bring_to(State.DECODING, r, call)
            [sequence] = r.worker.pipeline.sequences
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
            try:
                with caplog.at_level(logging.ERROR):
                    async with asyncio.timeout(5.0):
                        await r.worker.stop()
                assert "1 requests with 3 pages are abandoned" in caplog.text
                assert "an engine step that does not end is abandoned" in caplog.text
            finally:
                free.set()
                engine.step = step  # type: ignore[method-assign]
            with pytest.raises(PdserveError):
                await call.answer()
        r.worker.pipeline.scheduler.leave(sequence, *sequence.ending)  # type: ignore[misc]
        assert r.worker._thread.close(WAIT_S)


async def test_a_task_that_dies_during_a_step_frees_no_page_that_it_writes(caplog: pytest.LogCaptureFixture) -> None:
    async def die() -> None:
        raise RuntimeError("planted")

    async with rig() as r, r.call(prompt(9), LONG) as call:
        await bring_to(State.DECODING, r, call)
        [sequence] = r.worker.pipeline.sequences
        gate = Gate(r)
        await gate.closed()
        await r.describe_until(lambda: sequence.stepping)
        r.worker._background.spawn(die(), "planted task")
        with pytest.raises(Internal, match="the decode worker failed"):
            await call.answer()
        assert sequence.stepping and r.worker.blocks.held_count == len(sequence.pages) >= 3
        await gate.open()
        await r.empty()


async def test_a_fault_in_the_books_of_a_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r, r.call(prompt(9), LONG) as call, r.call(prompt(7), LONG) as waiting:
        await waiting.admitted()
        await bring_to(State.DECODING, r, call)

        def broken(*_: object) -> int:
            raise RuntimeError("planted")

        monkeypatch.setattr(r.worker.pipeline.scheduler, "apply", broken)
        for each in (call, waiting):
            with pytest.raises(Internal, match="the decode worker failed"):
                await each.answer()
        assert r.worker.broken.is_set()
        await r.empty()


async def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    bundle = small_bundle()
    small = tiny_engine(spec(vocab_size=bundle.vocab_size - 1))
    with pytest.raises(ConfigError) as caught:
        DecodeWorker(small, bundle, DecodeSettings())
    assert (caught.value.reason, caught.value.field) == ("SIZE_MISMATCH", "tokenizer")


@pytest.mark.parametrize("name", ["handoff_s", "generate_s", "max_attempts"])
def test_bounds_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeSettings(**{name: 0}).check()  # type: ignore[arg-type]
    assert caught.value.field == f"decode.{name}"
