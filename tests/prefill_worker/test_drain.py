"""A prefill worker that is told to stop, with one transfer half done and another not begun."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.errors import Unavailable
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefill_worker.worker import PrefillWorker
from tests.e2e.processes import Process
from tests.engine.tiny import prompt, tiny_engine, tiny_model
from tests.prefill_worker.decode_side import WAIT_S, DecodeSide
from tests.prefill_worker.rig import Rig, check_equal, local, rig

HALF, NOT_BEGUN = prompt(30, seed=1), prompt(25, seed=2)
SERVING = health_pb2.HealthCheckResponse.SERVING
CONFIG = """
[engine]
pages = 64
page_size = 4
deterministic = true
[prefill]
max_running = 1
grace_s = 20.0
"""


@asynccontextmanager
async def both(made: Rig) -> AsyncIterator[list[Any]]:
    """Two calls under way: decode holds the first frame of one, and the other waits for its turn."""
    made.decode.may_write.clear()
    first = made.start(made.request(HALF))
    async with asyncio.timeout(WAIT_S):
        await made.decode.writing.wait()
    second = made.start(made.request(NOT_BEGUN))
    await made.until_waiting(1)
    try:
        yield [first, second]
    finally:
        made.decode.may_write.set()


async def check_refused(stub: Any, request: Any) -> None:
    """At once, with a reason that sends the router elsewhere."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Run(request, timeout=WAIT_S)
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable) and (error.reason, error.retryable) == ("DRAINING", True)


async def test_what_is_there_finishes_within_the_grace_period() -> None:
    async with rig(max_running=1) as made, both(made) as calls:
        draining = asyncio.create_task(made.worker.drain(WAIT_S))
        await made.until(lambda: made.worker.state == "draining")
        await check_refused(made.stub, made.request(prompt(9)))
        assert not draining.done() and len(made.worker.pipeline.jobs) == 2
        made.decode.may_write.set()
        for call, ids in zip(calls, (HALF, NOT_BEGUN), strict=True):
            assert (await made.outcome(call)).sent_tokens == len(ids)
        async with asyncio.timeout(WAIT_S):
            await draining
        for ticket, ids in zip(made.tickets, (HALF, NOT_BEGUN), strict=False):
            check_equal(made, ticket.handoff_id, local(tiny_engine(deterministic=True), ids, chunk_tokens=16))


async def test_what_outlasts_it_ends_in_typed_errors() -> None:
    async with rig(max_running=1) as made, both(made) as calls:
        async with asyncio.timeout(WAIT_S):
            await made.worker.drain(0.2)
        assert not made.worker.blocks.held_count
        for call in calls:
            with pytest.raises(Unavailable) as caught:
                await made.outcome(call)
            assert (caught.value.reason, caught.value.retryable) == ("DRAINING", True)
        assert not made.decode.received
        made.decode.may_write.set()


@pytest.mark.slow
async def test_a_terminated_process_keeps_its_pages_until_decode_has_them(tmp_path: Path) -> None:
    checkpoint, config = tmp_path / "tiny.pdmodel", tmp_path / "pdserve.toml"
    save_spec_checkpoint(checkpoint, tiny_model().spec, tiny_model().tensors)
    config.write_text(CONFIG)
    arguments = ["--config", str(config), "--model", str(checkpoint), "--port", "0"]
    process = Process("prefill_worker", arguments, tmp_path / "log")
    settings = EngineConfig(dtype="fp32", pages=64, page_size=8, axis_order="nhd", deterministic=True)
    side = DecodeSide(Engine(load_model(checkpoint, "fp32"), settings))
    await side.start()
    process.start()
    try:
        address = (await asyncio.to_thread(process.read_ready)).split()[-1]
        async with channel(address) as link:
            stub = prefill_pb2_grpc.PrefillStub(link)
            health: Any = health_pb2_grpc.HealthStub(link)
            workers: Any = worker_pb2_grpc.WorkerStub(link)
            made = Rig(cast(PrefillWorker, None), side, stub, workers, link)  # it is in another process
            side.may_write.clear()
            calls = [made.start(made.request(HALF))]
            async with asyncio.timeout(WAIT_S):
                await side.writing.wait()
            calls.append(made.start(made.request(NOT_BEGUN)))
            async with asyncio.timeout(WAIT_S):
                while (await made.workers.Describe(worker_pb2.DescribeRequest())).load.waiting != 1:
                    continue
            process.send(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING:
                    continue
            await check_refused(stub, made.request(prompt(9)))
            side.may_write.set()
            for call, ids in zip(calls, (HALF, NOT_BEGUN), strict=True):
                assert (await made.outcome(call)).sent_tokens == len(ids)
        assert await asyncio.to_thread(process.wait) == 0
        for ticket, ids in zip(made.tickets, (HALF, NOT_BEGUN), strict=False):
            check_equal(made, ticket.handoff_id, local(tiny_engine(deterministic=True), ids, chunk_tokens=2048))
    finally:
        process.kill()
        await side.stop()
