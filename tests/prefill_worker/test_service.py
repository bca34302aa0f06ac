"""What the worker tells others: Worker service, health, registry, and the process around it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_transfer.wire import contract_from_proto
from pdserve.engine.load import save_spec_checkpoint
from pdserve.errors import NotFound, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.__main__ import main
from tests.engine.tiny import prompt, tiny_model
from tests.prefill_worker.decode_side import WAIT_S
from tests.prefill_worker.rig import gated_engine, rig

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(to_worker: grpc.aio.Channel, service: str = "pdserve.v1.Prefill") -> int:
    stub = health_pb2_grpc.HealthStub(to_worker)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)).status)


async def test_describe_and_accounts_follow_a_prompt() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, worker_id="p1", lease_s=30.0) as made:
        call = made.start(made.request(prompt(30)))
        async with asyncio.timeout(WAIT_S):
            await engine.reached.wait()
        status = await made.workers.Describe(worker_pb2.DescribeRequest())
        assert contract_from_proto(status.contract) == made.worker.contract
        assert (status.worker_id, status.role, status.state) == ("p1", "prefill", "ready")
        accounts = await made.workers.Accounts(worker_pb2.AccountsRequest())
        assert (accounts.pages_total, accounts.pages_free, accounts.pages_held) == (64, 56, 8)
        (holding,) = accounts.holdings
        assert (holding.kind, holding.pages) == ("lease", 8)
        assert 0 < holding.deadline_left_s <= 30.0 and accounts.intact
        engine.open()
        await made.outcome(call)
        await made.idle()
        accounts = await made.workers.Accounts(worker_pb2.AccountsRequest())
        assert (accounts.pages_held, accounts.pages_cached, list(accounts.holdings)) == (0, 7, [])


async def test_a_worker_without_a_tokenizer_has_no_bundle() -> None:
    async with rig() as made:
        with pytest.raises(grpc.RpcError) as failure:
            [piece async for piece in made.workers.GetTokenizer(worker_pb2.GetTokenizerRequest(digest=bytes(32)))]
        assert isinstance(from_rpc_error(failure.value), NotFound)


async def test_it_registers_renews_and_leaves_before_it_drains() -> None:
    registry = MemoryRegistry()
    engine = gated_engine()
    async with rig(prefill=engine, registry=registry, worker_id="p1", grace_s=5.0, heartbeat_s=0.02) as made:
        (listed,) = await registry.snapshot()
        assert listed.record == replace(made.worker.record(), load=listed.record.load)
        assert [e.address for e in listed.record.endpoints] == [made.worker.address]
        call = made.start(made.request(prompt(30)))
        async with asyncio.timeout(WAIT_S):
            await engine.reached.wait()
        async with asyncio.timeout(WAIT_S):
            while (await registry.snapshot())[0].record.load.pages_held != 8:
                await made.workers.Describe(worker_pb2.DescribeRequest())
        draining = asyncio.ensure_future(made.worker.drain())
        async with asyncio.timeout(WAIT_S):
            while await registry.snapshot():
                await made.workers.Describe(worker_pb2.DescribeRequest())
        assert not call.done()
        engine.open()
        await made.outcome(call)
        async with asyncio.timeout(WAIT_S):
            await draining


async def test_health_follows_the_engine_and_the_drain() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, stall_s=0.1) as made:
        assert await health(made.channel) == SERVING
        call = made.start(made.request(prompt(9)))
        async with asyncio.timeout(WAIT_S):
            while await health(made.channel) == SERVING:
                pass
        with pytest.raises(Unavailable) as failure:  # at once, while the step still stands
            await made.outcome(call)
        assert (failure.value.reason, failure.value.retryable) == ("STALLED", True)
        assert made.worker.blocks.held_count == 3  # which the step may still write
        engine.open()
        async with asyncio.timeout(WAIT_S):
            while await health(made.channel) == NOT_SERVING:
                pass
        await made.worker.drain(0.0)
        assert await health(made.channel) == NOT_SERVING


async def test_a_task_that_dies_takes_the_worker_out_of_service() -> None:
    async with rig() as made:

        async def faulty() -> None:
            raise RuntimeError("planted")

        made.worker._background.spawn(faulty(), "planted")
        async with asyncio.timeout(WAIT_S):
            await made.worker.broken.wait()
        async with asyncio.timeout(WAIT_S):
            while await health(made.channel) == SERVING:
                pass
        made.worker.broken.clear()


async def test_the_process_serves_until_sigterm(tmp_path: Path) -> None:
    model = tiny_model()
    path = tmp_path / "tiny.pdmodel"
    save_spec_checkpoint(path, model.spec, model.tensors)
    command = [sys.executable, "-m", "prefill_worker", "--model", str(path), "--dtype", "fp32", "--pages", "16"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("prefill worker ready: ")
        async with channel(line.split()[-1]) as to_worker:
            stub = worker_pb2_grpc.WorkerStub(to_worker)
            status = await stub.Describe(worker_pb2.DescribeRequest(), timeout=WAIT_S)
            assert status.contract.page_size == 16 and status.load.pages_total == 16
            assert await health(to_worker) == SERVING
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "prefill_worker: model: no model is named (give --model PATH, or --model smollm2)"),
        (["--model", "missing.gguf"], "prefill_worker: path: missing.gguf does not exist (check the path)"),
        (["--model", "x", "--registry", "ftp://h"], "prefill_worker: registry.url: 'ftp' is not a kind of registry"),
        (["--model", "x", "--config", "missing.toml"], "prefill_worker: config: cannot read missing.toml"),
    ],
)
def test_an_error_is_one_clear_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(line) and error.count("\n") == 1
