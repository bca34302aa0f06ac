"""A prefill worker whose every handoff is damaged: others are asked, and nobody else means a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from cache_transfer.messages import PackedFrames, Unpacked
from cache_transfer.transport import GrpcTransport
from pdserve.client.events import Event, Tokens
from pdserve.errors import DataLoss
from pdserve.request import SamplingParams
from pdserve.rpc.events import HandoffRecord
from prefill_worker.worker import PrefillWorker
from tests.cache_transfer.by_hand import damaged
from tests.e2e.stack import Stack, alone, stack
from tests.engine.tiny import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=0)
IDS = prompt(40, seed=2)


class Damaging(GrpcTransport):
    """Turns over one bit of each frame's payload, after its digest was made."""

    def pack(self, frames: Sequence[Unpacked], secret: bytes) -> PackedFrames:
        packed = super().pack(frames, secret)
        for at in range(len(frames)):
            packed = damaged(packed, at)
        return packed


def damage(worker: PrefillWorker) -> None:
    """From now on everything that this worker sends is damaged."""
    peers: Any = worker.pipeline._peers
    take = peers.take

    def damaged(address: str) -> GrpcTransport:
        take(address)
        channel: grpc.aio.Channel = peers._pool.get(address)
        return Damaging(channel, address)

    peers.take = damaged


async def test_another_prefill_worker_is_asked_and_the_one_at_fault_is_not_asked_twice() -> None:
    async with stack() as made:
        damage(await made.add_prefill())
        await made.add_prefill()
        for _ in range(3):
            await made.add_decode()
        retried = 0
        for seed in range(8):
            ids = prompt(40, seed=seed)
            answer = await made.ask(ids, PARAMS)
            assert answer.ids == alone(ids, PARAMS).ids
            assert answer.record is not None and answer.record.prefill_worker == "p1"
            outcomes = [(a.prefill_worker, a.outcome, a.failed_worker) for a in answer.record.history]
            assert outcomes[-1] == ("p1", "length", "")
            assert outcomes[:-1] in ([], [("p0", "FRAME_DIGEST", "p0")])
            retried += len(outcomes) > 1
        assert retried > 0


@pytest.mark.parametrize(("decodes", "max_attempts", "attempts"), [(1, 16, 1), (3, 16, 3), (3, 2, 2)])
async def test_with_nobody_else_it_is_a_typed_error_and_never_text(
    decodes: int, max_attempts: int, attempts: int
) -> None:
    async with stack(max_attempts=max_attempts) as made:
        damage(await made.add_prefill())
        for _ in range(decodes):
            await made.add_decode()
        events, error = await failure(made)
        assert isinstance(error, DataLoss)
        assert not any(isinstance(event, Tokens) for event in events)
        record = events[-1]
        assert isinstance(record, HandoffRecord)
        assert (record.attempts, record.output_tokens, record.outcome) == (attempts, 0, error.reason)
        assert {a.failed_worker for a in record.history} == {"p0"}


async def failure(made: Stack) -> tuple[list[Event], DataLoss]:
    events: list[Event] = []
    with pytest.raises(DataLoss) as caught:
        async for event in made.client.generate(token_ids=IDS, sampling=PARAMS, want_record=True, timeout_s=60.0):
            events.append(event)
    return events, caught.value
