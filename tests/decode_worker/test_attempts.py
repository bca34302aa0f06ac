"""A cache that does not come, or comes wrong, and the attempt that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_transfer.contract import HandoffIdentity
from cache_transfer.messages import Outgoing, PackedFrames
from cache_transfer.shared import Ring
from cache_transfer.transport import PushStream
from cache_transfer.wire import contract_to_proto, identity_from_proto, identity_to_proto
from decode_worker.sequence import State
from pdserve.errors import DataLoss, DeadlineExceeded, Fenced, Incompatible, Refused
from pdserve.request import SamplingParams
from pdserve.v1 import common_pb2, decode_pb2
from tests.cache_transfer.by_hand import damaged
from tests.decode_worker.driving import bring_to
from tests.decode_worker.rig import Call, Rig, local, rig
from tests.engine.tiny import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
LONG = replace(PARAMS, max_tokens=80)


async def test_a_sender_that_stalls_may_be_replaced() -> None:
    async with rig(idle_s=0.5) as r, r.call(prompt(9), PARAMS) as call:
        task = await bring_to(State.RECEIVING, r, call)
        assert task is not None
        with pytest.raises(DeadlineExceeded):
            await task
        assert r.worker.blocks.held_count == 0
        admitted = decode_pb2.Admitted(ticket=await retry(r, call), identity=_identity(r))
        await r.push(admitted, r.prefill.compute(call.ids))
        assert (await call.answer()).ids == local([prompt(9)], PARAMS)[0].ids


async def test_an_expired_ticket_opens_nothing() -> None:
    async with rig(ticket_ttl_s=0.1) as r, r.call(prompt(9), PARAMS) as call:
        admitted = await call.admitted()
        with pytest.raises(DeadlineExceeded):
            await call.answer()
        with pytest.raises(Refused):
            await r.push(admitted, r.prefill.compute(call.ids))


async def test_a_failed_attempt_is_retried_with_a_new_ticket() -> None:
    async with rig() as r, r.call(prompt(9), PARAMS) as call:
        admitted, computed = await call.admitted(), r.prefill.compute(call.ids)
        with pytest.raises(DataLoss):
            await r.push(admitted, computed, transport=Tamper(r))
        assert r.worker.blocks.held_count == 0
        ticket = await retry(r, call)
        assert (ticket.attempt, ticket.handoff_id) == (2, admitted.ticket.handoff_id)
        assert ticket.secret != admitted.ticket.secret
        with pytest.raises(Fenced):  # the old ticket is stale
            await r.push(admitted, computed)
        await r.push(admitted, computed, ticket=ticket)
        assert (await call.answer()).ids == local([prompt(9)], PARAMS)[0].ids


async def test_a_retry_fences_the_attempt_that_runs() -> None:
    async with rig() as r, r.call(prompt(9), PARAMS) as call:
        task = await bring_to(State.RECEIVING, r, call)
        assert task is not None
        ticket = await retry(r, call)
        assert r.worker.blocks.held_count == 0  # drained before the new ticket went out
        with pytest.raises(Fenced):
            await task
        admitted = decode_pb2.Admitted(ticket=ticket, identity=_identity(r))
        await r.push(admitted, r.prefill.compute(call.ids))
        assert (await call.answer()).ids == local([prompt(9)], PARAMS)[0].ids


async def test_a_retry_with_another_contract_ends_the_request() -> None:
    async with rig() as r, r.call(prompt(9), PARAMS) as call:
        await call.admitted()
        contract = replace(r.prefill.contract, model_digest=bytes(32))
        await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(contract)))
        with pytest.raises(Incompatible) as caught:
            await call.answer()
        assert caught.value.field == "MODEL_DIGEST"


async def test_a_late_retry_does_not_disturb_the_answer() -> None:
    async with rig() as r, r.call(prompt(9), LONG) as call:
        await bring_to(State.DECODING, r, call)
        await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(r.prefill.contract)))
        assert (await call.answer()).ids == local([prompt(9)], LONG)[0].ids


async def test_a_tampered_frame_gives_no_token() -> None:
    async with rig(ticket_ttl_s=0.3) as r, r.call(prompt(9), PARAMS) as call:
        admitted = await call.admitted()
        with pytest.raises(DataLoss):
            await r.push(admitted, r.prefill.compute(call.ids), transport=Tamper(r))
        with pytest.raises(DeadlineExceeded, match="the last attempt failed"):
            await call.answer()


async def test_another_requests_cache_is_refused() -> None:
    async with rig() as r, r.call(prompt(9), PARAMS) as call, r.call(prompt(9, seed=1), PARAMS) as other:
        admitted, foreign = await call.admitted(), await other.admitted()
        identity: HandoffIdentity = identity_from_proto(foreign.identity)
        with pytest.raises(Incompatible) as caught:
            await r.push(admitted, r.prefill.compute(other.ids), identity=identity)
        assert caught.value.field == "IDENTITY.prompt_digest"
        assert r.worker.blocks.held_count == 0


class Tamper:
    """A transport that flips one bit of each frame's payload on its way."""

    def __init__(self, r: Rig) -> None:
        self._whole = r.transport
        self.pack = r.transport.pack

    def take_ring(self, secret: bytes, largest_payload: int, whole: int) -> None:
        """Its payloads go over the stream."""

    def give_ring_back(self, ring: Ring, *, unused: bool) -> None:
        raise AssertionError("none was taken")

    def open(self, deadline_s: float) -> PushStream:
        stream = self._whole.open(deadline_s)
        send = stream.send

        async def tampered(message: Outgoing) -> None:
            await send(damaged(message) if isinstance(message, PackedFrames) else message)

        stream.send = tampered  # type: ignore[method-assign]
        return stream


async def retry(r: Rig, call: Call) -> common_pb2.Ticket:
    await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(r.prefill.contract)))
    return await call.ticket()


def _identity(r: Rig) -> common_pb2.HandoffIdentity:
    [sequence] = r.worker.pipeline.scheduler.waiting
    assert sequence.identity is not None
    return identity_to_proto(sequence.identity)
