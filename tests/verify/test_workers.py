"""Running workers as sides: shown only with leave, bounded, and with every page back afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.engine.engine import Engine
from pdserve.errors import Exhausted, InvalidRequest, PdserveError, Refused, Unavailable
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.tokenizer import Tokenizer
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.verify import remote
from pdserve.verify.compare import Comparison
from pdserve.verify.run import Request, verify
from pdserve.worker.trace import read_trace
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.e2e.stack import pair
from tests.e2e.watched import WatchedEngine, engine
from tests.engine.tiny import TINY, prompt, tiny_engine
from tests.prefill_worker.rig import rig
from tests.router import support as router_support
from tests.verify.support import PROMPTS, sides

WAIT_S = 20.0


@asynccontextmanager
async def worker(
    model: Engine | None = None, *, allow_trace: bool = True, **settings: Any
) -> AsyncIterator[PrefillWorker]:
    """At the end no page is held."""
    made = PrefillWorker(
        model or tiny_engine(deterministic=True),
        None,
        PrefillSettings(allow_trace=allow_trace, grace_s=1.0, **settings),
    )
    await made.start()
    try:
        yield made
        accounts = made.accounts()
        assert not accounts.fault and not accounts.holdings and accounts.pages_held == 0
        assert not made.broken.is_set()
    finally:
        await made.stop()


async def against(*texts: str, ids: Any = PROMPTS) -> tuple[Comparison, ...]:
    request = Request(ids=ids, tokens=2)
    comparisons, _ = await asyncio.to_thread(verify, sides(*texts, deterministic=True), request)
    return comparisons


async def trace(address: str, **request: Any) -> Any:
    """One Trace call; raises the typed error."""
    async with channel(address) as to_worker:
        stub = worker_pb2_grpc.WorkerStub(to_worker)
        try:
            return await read_trace(stub.Trace(worker_pb2.TraceRequest(**request), timeout=WAIT_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


async def test_two_workers_of_one_model_are_equal() -> None:
    async with worker() as a, worker(tiny_engine(deterministic=True, page_size=8, axis_order="nhd")) as b:
        (comparison,) = await against(f"worker:{a.address}", f"worker:{b.address},chunked:3")
    assert comparison.equal, comparison.first
    assert all(finding.bits_equal for finding in comparison.findings)
    assert {f.tensor for f in comparison.findings} >= {"positions", "x", "length", "k", "v", "visible", "attended", "y"}


@pytest.mark.parametrize("columns", [256, 5], ids=["whole rows", "a choice of columns"])
async def test_a_worker_equals_its_checkpoint_in_this_process(
    tiny: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "COLUMNS", columns)
    async with worker() as a:
        (comparison,) = await against(str(tiny), f"worker:{a.address}")
    assert comparison.equal, comparison.first
    assert comparison.right.record["contract_digest"] != ""


async def test_a_worker_of_another_model_is_found() -> None:
    async with worker() as a, worker(tiny_engine(deterministic=True, seed=1)) as b:
        (comparison,) = await against(f"worker:{a.address}", f"worker:{b.address}")
    assert comparison.first is not None and (comparison.first.layer, comparison.first.tensor) == (0, "x")


async def test_text_is_read_with_the_workers_own_tokenizer() -> None:
    settings = PrefillSettings(allow_trace=True, grace_s=1.0, engine=router_support.ENGINE)
    made = PrefillWorker(router_support.model(), router_support.bundle(), settings)
    await made.start()
    try:
        both = sides(f"worker:{made.address}", f"worker:{made.address},chunked:3")
        (comparison,), prompts = await asyncio.to_thread(verify, both, Request(texts=("the cat",)))
        assert comparison.equal and prompts == (Tokenizer(router_support.bundle()).encode("the cat"),)
    finally:
        await made.stop()


async def test_without_leave_a_worker_shows_nothing() -> None:
    async with worker(allow_trace=False) as a:
        with pytest.raises(Refused) as error:
            await against(f"worker:{a.address}", f"worker:{a.address}")
    assert (error.value.reason, error.value.field) == ("TRACE_OFF", "allow_trace")
    assert "allow_trace = true" in error.value.remedy


async def test_a_decode_worker_points_to_prefill() -> None:
    async with pair() as made:
        with pytest.raises(Refused) as error:
            await trace(made.decodes[0].address, token_ids=[1], columns=8)
    assert error.value.reason == "TRACE_OFF" and "prefill" in error.value.remedy


def test_it_is_off_unless_turned_on() -> None:
    assert not PrefillSettings().allow_trace


async def test_a_worker_that_is_not_there() -> None:
    async with worker() as a:
        address = a.address
    with pytest.raises(Unavailable):
        await against(f"worker:{address}", f"worker:{address}")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"token_ids": []}, "EMPTY_PROMPT"),
        ({"token_ids": [1, TINY.vocab_size]}, "TOKEN_OUT_OF_RANGE"),
        ({"token_ids": [1, -1]}, "TOKEN_OUT_OF_RANGE"),
        ({"token_ids": [1] * 513}, "TRACE_TOO_LONG"),
        ({"token_ids": [1], "columns": 0}, "INVALID_COLUMNS"),
        ({"token_ids": [1], "columns": 4097}, "INVALID_COLUMNS"),
    ],
)
async def test_what_a_worker_refuses_to_show(request_: dict[str, Any], reason: str) -> None:
    async with worker() as a:
        with pytest.raises(InvalidRequest) as error:
            await trace(a.address, **{"columns": 8, **request_})
    assert error.value.reason == reason


async def test_a_choice_of_columns_bounds_what_is_sent() -> None:
    async with worker() as a:
        run = await trace(a.address, token_ids=prompt(9), columns=5)
    sizes = {rows.tensor: (rows.columns, len(rows.data), rows.shape) for rows in run.rows}
    assert sizes["x"] == (5, 9 * 5 * 4, (TINY.width,))
    assert sizes["k"] == (5, 9 * 5 * 4, (TINY.kv_heads, TINY.head_dim))
    assert sizes["logits"] == (TINY.vocab_size, TINY.vocab_size * 4, (TINY.vocab_size,))


async def held(model: WatchedEngine, a: PrefillWorker) -> asyncio.Task[Any]:
    """A trace that stands still inside its first step."""
    task = asyncio.create_task(trace(a.address, token_ids=prompt(9), columns=8))
    async with asyncio.timeout(WAIT_S):
        await model.inside.wait()
    return task


async def test_one_prompt_is_traced_at_a_time_and_its_pages_are_in_the_books() -> None:
    model = engine()
    async with worker(model) as a:
        with model.held():
            task = await held(model, a)
            accounts = a.accounts()
            assert not accounts.fault and [h.pages for h in accounts.holdings] == [3]
            with pytest.raises(Exhausted) as error:
                await trace(a.address, token_ids=prompt(9), columns=8)
            assert error.value.reason == "TRACE_BUSY"
        await task
        await trace(a.address, token_ids=prompt(9), columns=8)


async def test_a_caller_that_goes_away_leaves_no_page_behind() -> None:
    model = engine()
    freed = asyncio.Event()
    async with worker(model) as a:
        a._tracer._freed = freed.set
        with model.held():
            task = await held(model, a)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert a.blocks.held_count == 3  # a step still writes them
        async with asyncio.timeout(WAIT_S):
            await freed.wait()


async def test_a_worker_stops_while_a_prompt_is_traced() -> None:
    model = engine()
    async with worker(model) as a:
        with model.held():
            task = await held(model, a)
            stopping = asyncio.create_task(a.stop())
            with pytest.raises(PdserveError):
                await task
        await stopping


async def test_a_lease_ends_a_trace_that_takes_too_long() -> None:
    model = engine()
    async with worker(model, lease_s=0.05) as a:
        with model.held():
            with pytest.raises(PdserveError) as error:
                await (await held(model, a))
            assert error.value.reason == "LEASE_ENDED"
        await trace_until_free(a)


async def test_a_prompt_that_waits_for_the_pages_of_a_trace_gets_them() -> None:
    model = engine(pages=3)
    async with rig(prefill=model, allow_trace=True) as made:
        with model.held():
            task = await held(model, made.worker)
            running = asyncio.create_task(made.run(prompt(9)))
            await made.until_waiting(1)
        await task
        async with asyncio.timeout(WAIT_S):
            response, _ = await running
        assert response.computed_tokens == 9


async def test_a_trace_takes_no_longer_steps_than_a_served_prompt() -> None:
    model = engine()
    async with worker(model, chunk_tokens=4, max_running=2) as a:
        await trace(a.address, token_ids=prompt(9), columns=8)
        assert [len(step.plan.chunks[0].ids) for step in model.steps] == [4, 4, 1]
        await trace(a.address, token_ids=prompt(9), columns=8, chunk_tokens=3)
        assert [len(step.plan.chunks[0].ids) for step in model.steps[3:]] == [3, 3, 3]


async def trace_until_free(a: PrefillWorker) -> None:
    async with channel(a.address) as to_worker:
        stub = worker_pb2_grpc.WorkerStub(to_worker)
        async with asyncio.timeout(WAIT_S):
            while (await stub.Accounts(worker_pb2.AccountsRequest())).holdings:
                pass
