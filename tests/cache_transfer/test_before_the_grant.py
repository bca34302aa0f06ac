"""A sender that does not wait for its grant: the receiver notices while it still waits for pages itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cache_transfer.messages import Outgoing, PackedFrames
from cache_transfer.opening import make_opening
from cache_transfer.transport import PushStream
from pdserve.errors import Cancelled, InvalidRequest, PdserveError
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.by_hand import in_memory, make_stream
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair, make_pair, random_cache

TOKENS = 8
EARLY = {"an opening": 0, "a frame": 1, "logits": -2, "a commit": -1}


def on_its_way(request: pb.PushRequest, kind: str) -> Outgoing:
    """As its transport takes it."""
    data = request.SerializeToString()
    message = in_memory(data)
    return replace(message, data=data) if kind == "grpc" and isinstance(message, PackedFrames) else message


async def check_ended(pair: Pair, stream: PushStream, error: type[PdserveError], reason: str) -> None:
    """With no page granted, and before there was one."""
    with pytest.raises(error) as caught:
        async with asyncio.timeout(WAIT_S):
            await stream.receive()
    assert caught.value.reason == reason
    async with asyncio.timeout(WAIT_S):
        await pair.host.over.wait()
    assert not pair.host.may_grant.is_set() and not pair.host.sinks
    assert [(type(e), e.reason) for _, e in pair.host.failed] == [(error, reason)] and pair.host.done == []
    await stream.close()
    await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize("place", EARLY.values(), ids=EARLY.keys())
async def test_nothing_may_come_before_it(kind: str, place: int) -> None:
    async with make_pair(kind) as pair:
        pair.host.may_grant.clear()
        ticket, identity = pair.issue(TOKENS)
        requests = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, TOKENS))
        stream = pair.transport.open(WAIT_S)
        await stream.send(on_its_way(requests[0], kind))
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
        await stream.send(on_its_way(requests[place], kind))
        await check_ended(pair, stream, InvalidRequest, "MESSAGE_ORDER")


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_stream_that_ends_before_it_does_not_wait_for_pages(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.host.may_grant.clear()
        ticket, identity = pair.issue(TOKENS)
        stream = pair.transport.open(WAIT_S)
        await stream.send(make_opening(ticket, identity, pair.sends, logits_only=False))
        async with asyncio.timeout(WAIT_S):
            await pair.host.asked.wait()
        await stream.finish_sending()
        await check_ended(pair, stream, Cancelled, "SENDER_GONE")
