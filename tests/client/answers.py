"""Scripted answers of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from pdserve.client import Accepted, Finish, HandoffRecord, Usage
from pdserve.errors import FieldDifference, PdserveError
from pdserve.rpc import convert
from pdserve.rpc.events import PositionLogprobs, TokenBatch, TokenLogprob
from pdserve.rpc.later_fields import later_fields
from pdserve.rpc.status import abort, to_detail
from pdserve.v1 import gateway_pb2 as pb
from tests.rpc.gateway import ScriptedGateway

Ask = Callable[..., Awaitable[Any]]  # of either client, see conftest.py

ACCEPTED = Accepted("server-id", "tiny", 3, 7)
USAGE = Usage(3, 4, 1)
FINISH = Finish("stop", USAGE, stop_string="!")
RECORD = HandoffRecord(request_id="server-id", frames_sent=4, conversions=(FieldDifference("PAGE_SIZE", "8", "16"),))
LOGPROBS = tuple(PositionLogprobs(TokenLogprob(n, -0.5, 0), (TokenLogprob(n, -0.5, 0),)) for n in (10, 11))
# "caf\u00e9 \U0001f600": the second batch ends inside the smiley, which a server should not do but a client survives.
BATCHES = (
    TokenBatch(0, (10, 11), b"caf", LOGPROBS),
    TokenBatch(2, (12,), "é ".encode() + "😀".encode()[:2]),
    TokenBatch(3, (13,), "😀".encode()[2:]),
)


def message(event: Any) -> pb.GenerateEvent:
    if isinstance(event, TokenBatch):
        return pb.GenerateEvent(tokens=convert.tokens_to_proto(event))
    if isinstance(event, Accepted):
        return pb.GenerateEvent(accepted=convert.accepted_to_proto(event))
    if isinstance(event, HandoffRecord):
        return pb.GenerateEvent(record=convert.record_to_proto(event))
    if isinstance(event, PdserveError):
        return pb.GenerateEvent(error=to_detail(event))
    return pb.GenerateEvent(finish=convert.finish_to_proto(event))


def answering(*events: Any, requests: list[Any] | None = None) -> ScriptedGateway:
    """Sends the events; an error is sent as an event and then as the status, as the gateway does."""

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if requests is not None:
            requests.append(request)
        for event in events:
            yield message(event)
            if isinstance(event, PdserveError):
                await abort(context, event)

    return ScriptedGateway(generate=generate)


def reading(requests: list[Any]) -> ScriptedGateway:
    """A router that knows every field, and answers nothing else."""

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        requests.append(request)
        yield message(replace(ACCEPTED, read_fields=tuple(later_fields(request))))
        yield message(FINISH)

    return ScriptedGateway(generate=generate)


def hanging(started: asyncio.Event, cancelled: asyncio.Event) -> ScriptedGateway:
    """Sends one batch, then waits until it is cancelled."""

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        try:
            yield message(BATCHES[0])
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    return ScriptedGateway(generate=generate)
