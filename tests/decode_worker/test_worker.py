"""The worker around its requests: health, registry, drain, accounts, start-up errors, the command."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.__main__ import main
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.load import save_spec_checkpoint
from pdserve.errors import ConfigError, NotFound, PdserveError, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, DRAINING, READY
from pdserve.registry.redis import RedisRegistry
from pdserve.request import SamplingParams
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import worker_pb2
from tests.decode_worker.rig import WAIT_S, local, rig
from tests.decode_worker.small_bundle import small_bundle
from tests.engine.tiny import SEVEN, prompt, seven_model, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=60)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_follows_a_stuck_engine() -> None:
    async with rig(stall_s=0.1) as r:
        watch = health_pb2_grpc.HealthStub(r.decode).Watch(health_pb2.HealthCheckRequest(service="pdserve.v1.Decode"))
        seen = [(await watch.read()).status]
        free = threading.Event()
        stuck = asyncio.create_task(r.worker._thread.run(free.wait, WAIT_S))
        async with asyncio.timeout(WAIT_S):
            seen.append((await watch.read()).status)
        free.set()
        await stuck
        async with asyncio.timeout(WAIT_S):
            seen.append((await watch.read()).status)
        watch.cancel()
        assert seen == [SERVING, NOT_SERVING, SERVING]


async def test_a_long_step_within_the_bound_leaves_health_alone() -> None:
    async with rig(stall_s=5.0) as r:
        stub = health_pb2_grpc.HealthStub(r.decode)
        free = threading.Event()
        stuck = asyncio.create_task(r.worker._thread.run(free.wait, WAIT_S))
        while r.worker.busy_s < 10 * r.worker.settings.reap_s:  # the watchdog has looked several times
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        free.set()
        await stuck


async def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    registry = MemoryRegistry()
    async with rig(registry=registry) as r:
        [listed] = await registry.snapshot()
        assert (listed.record.role, listed.record.state) == (DECODE, READY)
        assert listed.record.endpoints[0].address == r.worker.address
        assert listed.record.transfer[0].address == r.worker.transfer_address
        async with r.call(prompt(9), LONG) as call:
            await r.push(await call.admitted(), r.prefill.compute(call.ids))
            draining = asyncio.create_task(r.worker.drain(WAIT_S))
            await r.describe_until(lambda: r.worker.state == DRAINING)
            async with r.call(prompt(9), PARAMS) as late:
                with pytest.raises(Unavailable) as caught:
                    await late.event()
            assert caught.value.reason == "DRAINING" and caught.value.retryable
            assert (await call.answer()).ids == local([prompt(9)], LONG)[0].ids
            await draining
        assert await registry.snapshot() == ()


async def test_after_the_grace_the_rest_ends_with_an_error() -> None:
    async with rig() as r, r.call(prompt(9), LONG) as waiting, r.call(prompt(9), PARAMS) as other:
        await waiting.admitted()
        await other.admitted()
        await r.worker.drain(0.0)
        for call in (waiting, other):
            with pytest.raises(Unavailable):
                await call.answer()


async def test_a_dead_background_task_breaks_the_worker_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as r, r.call(prompt(9), LONG) as call:
        await call.admitted()

        async def die() -> None:
            raise RuntimeError("planted")

        r.worker._background.spawn(die(), "planted task")
        with pytest.raises(PdserveError, match="the decode worker failed"):
            await call.answer()
        assert r.worker.broken.is_set() and r.worker.state == DRAINING
        assert "planted task died" in caplog.text
        check = await health_pb2_grpc.HealthStub(r.decode).Check(health_pb2.HealthCheckRequest())
        assert check.status == NOT_SERVING


async def test_it_tells_about_itself() -> None:
    bundle = small_bundle()
    async with rig(bundle=bundle) as r, r.call(prompt(9), LONG) as call:
        status = await r.about.Describe(worker_pb2.DescribeRequest())
        assert (status.role, status.state, status.model) == (DECODE, READY, "tiny")
        assert status.contract_digest == r.worker.contract.digest()
        pieces = [p.data async for p in r.about.GetTokenizer(worker_pb2.GetTokenizerRequest(digest=bundle.digest()))]
        assert b"".join(pieces) == bundle.to_bytes()
        with pytest.raises(Exception) as caught:
            _ = [p async for p in r.about.GetTokenizer(worker_pb2.GetTokenizerRequest(digest=bytes(32)))]
        error = from_rpc_error(caught.value)  # type: ignore[arg-type]
        assert isinstance(error, NotFound) and error.reason == "UNKNOWN_BUNDLE"

        admitted = await call.admitted()
        sender = r.sender(admitted, r.prefill.compute(call.ids), layers=0)
        pushing = asyncio.create_task(sender.run())
        await r.describe_until(lambda: r.worker.blocks.held_count > 0)
        accounts = await r.about.Accounts(worker_pb2.AccountsRequest())
        assert (accounts.pages_total, accounts.pages_held, accounts.intact) == (64, 3, True)
        [holding] = accounts.holdings
        assert (holding.owner, holding.kind, holding.pages) == ("r#1", "grant", 3)
        assert 0 < holding.deadline_left_s <= r.worker.settings.receive_s
        status = await r.about.Describe(worker_pb2.DescribeRequest())
        assert (status.load.waiting, status.load.queued_tokens, status.load.pages_held) == (1, 9, 3)
        pushing.cancel()
        await asyncio.wait({pushing})


async def test_without_a_tokenizer_there_is_no_bundle() -> None:
    async with rig() as r:
        with pytest.raises(Exception) as caught:
            _ = [p async for p in r.about.GetTokenizer(worker_pb2.GetTokenizerRequest())]
        assert isinstance(from_rpc_error(caught.value), NotFound)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["port", "transfer_port"])
async def test_a_port_in_use_is_one_clear_error(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = DecodeWorker(tiny_engine(), None, DecodeSettings(**{name: taken.getsockname()[1]}))
        with pytest.raises(ConfigError, match="cannot listen on"):
            await worker.start()


async def test_a_registry_that_is_down_at_start_is_one_clear_error() -> None:
    registry = RedisRegistry("redis://127.0.0.1:1/0", "test:", 1.0)
    worker = DecodeWorker(tiny_engine(), None, DecodeSettings(), registry)
    with pytest.raises(Unavailable):
        await worker.start()
    await registry.close()


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("ticket_ttl_s", 0.0), ("grace_s", -1.0)])
def test_settings_that_cannot_work_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeSettings(**{name: value}).check()  # type: ignore[arg-type]
    assert caught.value.field == f"decode.{name}"


def checkpoint(folder: Path) -> str:
    path = folder / "seven.pdmodel"
    save_spec_checkpoint(path, SEVEN, seven_model().tensors)
    return str(path)


async def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    arguments = ("--model", checkpoint(tmp_path), "--dtype", "float64", "--pages", "16")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "decode_worker", *arguments, stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
    assert line.startswith(b"decode worker ready: 127.0.0.1:"), await process.communicate()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = checkpoint(tmp_path), tmp_path / "pdserve.toml"
    config.write_text("[decode]\nmax_bach = 3\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wrong = {
            ("--model", "/does/not/exist.gguf"): "/does/not/exist.gguf does not exist",
            (): "no model is named",
            ("--config", str(config)): "decode.max_bach: unknown key",
            ("--model", model, "--dtype", "float64", "--port", str(taken.getsockname()[1])): "cannot listen on",
            ("--model", model, "--dtype", "float64", "--registry", "redis://127.0.0.1:1/0"): "127.0.0.1:1",
            ("--model", model, "--dtype", "fp7"): "fp7",
            ("--model", model, "--dtype", "float64", "--host", "0.0.0.0"): "not permitted",
        }
        for arguments, message in wrong.items():
            assert main(arguments) == (1 if "--registry" in arguments else 2)  # an outage is not a wrong setting
            out, err = capsys.readouterr()
            assert out == "" and len(err.splitlines()) == 1, err
            assert err.startswith("decode_worker: ") and message in err
