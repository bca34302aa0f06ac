"""No cache meets a worker that it does not fit: every must-equal field, at every door.

Each field is changed alone, and each door refuses with FAILED_PRECONDITION and the field's
name before it holds a page, computes a token or streams one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cache_transfer.contract import WorkerContract
from cache_transfer.opening import make_opening
from cache_transfer.transport import GrpcTransport
from cache_transfer.wire import contract_to_proto, identity_from_proto, ticket_from_proto
from pdserve.errors import Incompatible, PdserveError, Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.status import from_rpc_error, grpc_code
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.e2e.contracts import CHANGES, CONVERTIBLE, INFORMATIONAL, LOSSY, Change, codes
from tests.e2e.stack import MODEL, Stack, alone, pair, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = prompt(21, seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=5, seed=0)
EVERY = pytest.mark.parametrize("code", list(CHANGES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Stack]:
    """Workers that do not announce themselves: what the router hears of them, a test writes into the registry."""
    async with stack() as it:
        await it.add_prefill(announced=False)
        await it.add_decode(announced=False)
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def made(shared: Stack) -> AsyncIterator[Stack]:
    yield shared
    await shared.check_free()


class DecodeCall:
    """One Decode/Generate stream, as a router opens it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def next(self) -> decode_pb2.DecodeEvent:
        """Raises what gRPC raises."""
        async with asyncio.timeout(WAIT_S):
            event = await self._call.read()
        assert isinstance(event, decode_pb2.DecodeEvent), "the stream ended"
        return event

    async def admitted(self) -> decode_pb2.Admitted:
        event = await self.next()
        assert event.WhichOneof("event") == "admitted"
        return event.admitted


@asynccontextmanager
async def decoding(made: Stack, prefill_contract: WorkerContract) -> AsyncIterator[DecodeCall]:
    opening = decode_pb2.DecodeOpen(
        request_id="direct",
        tenant="t",
        prompt_ids=IDS,
        sampling=sampling_to_proto(GREEDY),
        prefill_contract=contract_to_proto(prefill_contract),
    )
    async with channel(made.decodes[0].address) as link:
        call = decode_pb2_grpc.DecodeStub(link).Generate(timeout=WAIT_S)
        await call.write(decode_pb2.DecodeRequest(open=opening))
        try:
            yield DecodeCall(call)
        finally:
            call.cancel()


def run_request(admitted: decode_pb2.Admitted, decode_contract: WorkerContract) -> prefill_pb2.RunRequest:
    return prefill_pb2.RunRequest(
        request_id="direct",
        tenant="t",
        prompt_ids=IDS,
        ticket=admitted.ticket,
        identity=admitted.identity,
        decode_contract=contract_to_proto(decode_contract),
    )


def untouched(made: Stack) -> tuple[int, ...]:
    """Grows with any page that was ever given out, and with any step that was ever run."""
    return tuple(
        count for worker in made.workers for count in (worker.blocks.held_count, worker.blocks.cached_count)
    ) + tuple(worker.record().load.steps for worker in made.workers)


def check_refusal(error: grpc.RpcError, code: str) -> None:
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    check_named(from_rpc_error(error), code)


def check_named(error: BaseException, code: str) -> None:
    assert isinstance(error, Incompatible)
    assert tuple(d.code for d in error.differences) == codes(code)
    assert error.field == codes(code)[0] and code in error.message
    assert all(d.kind == "must_equal" and d.left != d.right for d in error.differences)


async def test_the_changes_cover_every_field() -> None:
    """A field that is added to the contract must be added here, or be of another class."""
    covered = {"version": "CONTRACT_VERSION", "planes": "LAYERS"}
    groups = {"positions": "POSITION_SCHEME.", "attention": "ATTENTION."}
    for field in fields(WorkerContract):
        if field.name in CONVERTIBLE | LOSSY | INFORMATIONAL:
            continue
        wanted = groups.get(field.name) or covered.get(field.name) or field.name.upper()
        assert any(code == wanted or code.startswith(wanted) for code in CHANGES), field.name


@EVERY
async def test_decode_refuses_another_prefill_contract(made: Stack, code: str) -> None:
    before = untouched(made)
    altered = CHANGES[code](made.prefills[0].contract)
    async with decoding(made, altered) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.next()  # the first thing that comes is the refusal
    check_refusal(caught.value, code)
    assert untouched(made) == before and not made.decodes[0].pipeline.sequences


@EVERY
async def test_a_push_with_another_contract_is_refused_and_its_ticket_stays_good(made: Stack, code: str) -> None:
    async with AsyncExitStack() as opened:
        call = await opened.enter_async_context(decoding(made, made.prefills[0].contract))
        admitted = await call.admitted()
        before = untouched(made)
        link = await opened.enter_async_context(channel(made.decodes[0].transfer_address))
        altered = CHANGES[code](made.prefills[0].contract)
        ticket, identity = ticket_from_proto(admitted.ticket), identity_from_proto(admitted.identity)
        push = GrpcTransport(link).open(WAIT_S)
        try:
            await push.send(make_opening(ticket, identity, altered, logits_only=False))
            with pytest.raises(Incompatible) as caught:
                async with asyncio.timeout(WAIT_S):
                    await push.receive()  # no grant
        finally:
            await push.close()
        check_named(caught.value, code)
        assert untouched(made) == before

        # The worker that the ticket was meant for can still use it.
        to_prefill = await opened.enter_async_context(channel(made.prefills[0].address))
        stub = prefill_pb2_grpc.PrefillStub(to_prefill)
        await stub.Run(run_request(admitted, made.decodes[0].contract), timeout=WAIT_S)
        assert (await call.next()).WhichOneof("event") == "tokens"


@EVERY
async def test_prefill_refuses_another_decode_contract(made: Stack, code: str) -> None:
    async with (
        decoding(made, made.prefills[0].contract) as call,
        channel(made.prefills[0].address) as link,
    ):
        admitted = await call.admitted()
        before = untouched(made)
        altered = CHANGES[code](made.decodes[0].contract)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(link).Run(run_request(admitted, altered), timeout=WAIT_S)
        check_refusal(caught.value, code)
        assert untouched(made) == before and not made.prefills[0].pipeline.jobs


@asynccontextmanager
async def registered(made: Stack, **changes: Change) -> AsyncIterator[None]:
    """Both workers in the registry, with `prefill` or `decode` contracts changed."""
    records = [worker.record() for worker in made.workers]
    records = [replace(r, contract=changes[r.role](r.contract)) if r.role in changes else r for r in records]
    for record in records:
        await made.router.registry.register(record)
    await made.router.pool.refresh()
    try:
        yield
    finally:
        for record in records:
            await made.router.registry.deregister(record.worker_id, record.incarnation)
        await made.router.pool.refresh()


async def refused(made: Stack) -> PdserveError:
    """How a request fails, of which nothing may come before its error."""
    events = []
    with pytest.raises(PdserveError) as caught:
        async for event in made.client.generate(token_ids=IDS, sampling=GREEDY):
            events.append(event)
    assert events == []
    return caught.value


@pytest.mark.parametrize("side", ["prefill", "decode"])
@EVERY
async def test_the_router_pairs_no_such_workers(made: Stack, code: str, side: str) -> None:
    before = untouched(made)
    async with registered(made, **{side: CHANGES[code]}):
        error = await refused(made)
        (matrix,) = (await made.client.status()).pairs
    check_named(error, code)
    assert grpc_code(error) is grpc.StatusCode.FAILED_PRECONDITION
    assert not matrix.fits and tuple(d.code for d in matrix.differences) == codes(code)
    assert untouched(made) == before


@pytest.mark.parametrize("code", [code for code in CHANGES if code != "TOKENIZER_DIGEST"])
async def test_workers_whose_records_lie_alike_still_refuse(made: Stack, code: str) -> None:
    """The registry makes the pair look fit; the decode worker itself compares with what it is.

    Another tokenizer does not come this far: the router cannot fetch it, see below.
    """
    before = untouched(made)
    async with registered(made, prefill=CHANGES[code], decode=CHANGES[code]):
        error = await refused(made)
    check_named(error, code)
    assert untouched(made) == before


async def test_a_tokenizer_that_no_worker_has_is_an_error_before_any_work(made: Stack) -> None:
    before = untouched(made)
    change = CHANGES["TOKENIZER_DIGEST"]
    async with registered(made, prefill=change, decode=change):
        error = await refused(made)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.field) == ("NO_TOKENIZER_BUNDLE", "tokenizer")
    assert untouched(made) == before


async def test_records_that_tell_the_truth_are_served(made: Stack) -> None:
    async with registered(made):
        got = await made.ask(IDS, GREEDY)
    assert got.ids == alone(IDS, GREEDY).ids


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ({}, {"kv_dtype": "bf16"}, ("KV_DTYPE",)),
        ({"kv_dtype": "bf16"}, {}, ("KV_DTYPE",)),
        ({"dtype": "bf16"}, {}, ("KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE")),
        ({"dtype": "bf16", "kv_dtype": "fp32"}, {}, ("WEIGHT_DTYPE", "ACTIVATION_DTYPE")),
    ],
)
async def test_another_precision_is_refused_by_name(
    prefill: dict[str, str], decode: dict[str, str], named: tuple[str, ...]
) -> None:
    async with pair(engine(**prefill), engine(**decode)) as made:  # type: ignore[arg-type]
        with pytest.raises(Incompatible) as caught:
            await made.ask(IDS, GREEDY)
        assert tuple(d.code for d in caught.value.differences) == named and caught.value.field == named[0]
        assert all(d.kind == "lossy" for d in caught.value.differences)
        # Not even a router that allows it gets past the decode worker, which does not.
    async with stack(allow_lossy=True) as made:
        await made.add_prefill(engine(**prefill))  # type: ignore[arg-type]
        await made.add_decode(engine(**decode))  # type: ignore[arg-type]
        with pytest.raises(Incompatible) as caught:
            await made.ask(IDS, GREEDY)
        assert tuple(d.code for d in caught.value.differences) == named
        assert not any(worker.record().load.steps for worker in made.workers)


async def test_what_does_not_matter_to_a_cache_is_not_refused() -> None:
    """Context limits and library versions are informational; a strict worker beside a fitting one harms nobody."""
    expected = alone(IDS, GREEDY)
    async with stack() as made:
        await made.add_prefill(engine(threads=1, pages=64))
        await made.add_decode(engine(pages=32))
        await made.add_decode(engine(seed=1), name=MODEL)  # another model under the same name
        for _ in range(4):
            got = await made.ask(IDS, GREEDY)
            assert got.ids == expected.ids
            assert got.record is not None and got.record.decode_worker == "d0"
            assert any("d1 refused: MODEL_DIGEST" in note for note in got.record.notes)
