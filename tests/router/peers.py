"""Workers that misbehave on purpose, over real gRPC: the faults that a healthy worker cannot be asked for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cache_transfer.contract import Endpoint, HandoffIdentity, Ticket, WorkerContract, prompt_digest
from cache_transfer.wire import contract_to_proto, identity_to_proto, ticket_to_proto
from pdserve.errors import PdserveError
from pdserve.rpc.convert import finish_to_proto, tokens_to_proto
from pdserve.rpc.events import Finish, TokenBatch, Usage
from pdserve.rpc.server import Server
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc


@dataclass
class BadPrefill(prefill_pb2_grpc.PrefillServicer):
    """Raises `error`, or hangs until it is cancelled; `lies` times it first says that it has done its work."""

    error: PdserveError | None = None
    lies: int = 0
    calls: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Run(self, request: prefill_pb2.RunRequest, context: Any) -> prefill_pb2.RunResponse:
        self.calls += 1
        self.called.set()
        if self.calls <= self.lies:
            return prefill_pb2.RunResponse()
        if self.error is not None:
            raise self.error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


@dataclass
class BadDecode(decode_pb2_grpc.DecodeServicer):
    """Admits, sends `tokens` (after those of `open`), and then ends as `end` says: an error, a finish, or a stream
    that just closes.
    """

    contract: WorkerContract
    tokens: int = 0
    end: PdserveError | Finish | None = None
    wait: asyncio.Event | None = None  # before the end
    complete: bool = False  # sends its tokens once it is asked for another ticket: the cache had come whole
    change: Callable[[HandoffIdentity], HandoffIdentity] = lambda identity: identity
    calls: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    mute: bool = False  # never even admits
    shift: int = 0  # of the index that its tokens claim to begin at
    more: int = 0  # tokens that its finish counts besides those it sent
    blank: bool = False  # a message without a token follows its tokens
    late: int = 0  # tokens, and another finish, that follow its finish

    async def Generate(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        self.calls += 1
        self.called.set()
        if self.mute:
            await asyncio.Event().wait()
        messages = aiter(requests)
        opening = (await anext(messages)).open
        yield decode_pb2.DecodeEvent(admitted=self._admitted(opening))
        if self.complete:
            assert (await anext(messages)).WhichOneof("request") == "retry"
        begin = opening.forwarded_tokens
        for index in range(begin, begin + self.tokens):
            yield decode_pb2.DecodeEvent(tokens=tokens_to_proto(TokenBatch(index + self.shift, (index,), b"x")))
        if self.blank:
            yield decode_pb2.DecodeEvent(tokens=tokens_to_proto(TokenBatch(begin + self.tokens, ())))
        if self.wait is not None:
            await self.wait.wait()
        if isinstance(self.end, PdserveError):
            raise self.end
        if isinstance(self.end, Finish):
            usage = Usage(len(opening.prompt_ids), begin + self.tokens + self.more)
            finish = decode_pb2.DecodeEvent(finish=finish_to_proto(replace(self.end, usage=usage)))
            yield finish
            for index in range(begin + self.tokens, begin + self.tokens + self.late):
                yield decode_pb2.DecodeEvent(tokens=tokens_to_proto(TokenBatch(index, (index,), b"x")))
                yield finish

    def _admitted(self, opening: decode_pb2.DecodeOpen) -> decode_pb2.Admitted:
        ids = (*opening.prompt_ids, *opening.output_ids)
        identity = HandoffIdentity(self.contract.digest(), None, opening.tenant, prompt_digest(ids), 0, len(ids))
        ticket = Ticket(
            handoff_id=secrets.token_bytes(16),
            attempt=1,
            incarnation=secrets.token_bytes(16),
            secret=secrets.token_bytes(32),
            ttl_ms=60_000,
            held_tokens=0,
            endpoints=(Endpoint("127.0.0.1:1"),),
        )
        return decode_pb2.Admitted(
            ticket=ticket_to_proto(ticket),
            identity=identity_to_proto(self.change(identity)),
            contract=contract_to_proto(self.contract),
        )


@asynccontextmanager
async def serving(peer: BadPrefill | BadDecode) -> AsyncIterator[str]:
    """The address of a peer that runs meanwhile."""
    server = Server()
    if isinstance(peer, BadPrefill):
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, peer)
    else:
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, peer)
    try:
        yield await server.start()
    finally:
        await server.stop()


def another_tenant(identity: HandoffIdentity) -> HandoffIdentity:
    return replace(identity, tenant="somebody else")
