"""Workers that cost nothing: they speak Decode and Prefill, compute no model, and say when each token left.

Everything a router does for a request it does for these too: gate, placement, both calls, every token.
The seed of a request is the pause between its tokens in microseconds; a token's text is the
monotonic clock when it was sent, in nanoseconds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    Endpoint,
    HandoffIdentity,
    PositionScheme,
    Ticket,
    WorkerContract,
    prompt_digest,
)
from cache_transfer.wire import contract_to_proto, identity_to_proto, ticket_to_proto
from pdserve.registry.client import RpcRegistry
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DECODE, PREFILL, READY, Load, WorkerRecord
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.convert import finish_to_proto, tokens_to_proto
from pdserve.rpc.events import LENGTH, Finish, TokenBatch, Usage
from pdserve.rpc.server import Server
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

MODEL = "stub"
LAYERS = 30  # as many planes to compare as a real small model has
SETTINGS = RegistrySettings(timeout_s=10.0)

CONTRACT = WorkerContract(
    model_digest=bytes(32),
    positions=PositionScheme(kind="rope", theta=10000.0, dims=64),
    attention=AttentionScheme(scale=0.125, sliding_window=(0,) * LAYERS),
    planes=((CachePlane("k", 3, 64), CachePlane("v", 3, 64)),) * LAYERS,
    vocab_size=49152,
    tokenizer_digest=b"",
    page_size=16,
    page_axis_order="hnd",
    device="cpu",
    kv_dtype="bf16",
    weight_dtype="bf16",
    activation_dtype="bf16",
    context_limit=1 << 20,
)


class StubPrefill(prefill_pb2_grpc.PrefillServicer):
    async def Run(self, request: prefill_pb2.RunRequest, context: Any) -> prefill_pb2.RunResponse:
        return prefill_pb2.RunResponse(computed_tokens=len(request.prompt_ids))


@dataclass(frozen=True)
class StubDecode(decode_pb2_grpc.DecodeServicer):
    """Admits everything, then sends `max_tokens` tokens of id 1."""

    contract: WorkerContract = CONTRACT

    async def Generate(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        opening = (await anext(aiter(requests))).open
        yield decode_pb2.DecodeEvent(admitted=self._admitted(opening))
        pause_s, count = opening.sampling.seed / 1e6, opening.sampling.max_tokens
        loop = asyncio.get_running_loop()
        due = loop.time()
        for index in range(count):
            if pause_s:
                due += pause_s
                await asyncio.sleep(due - loop.time())
            text = time.monotonic_ns().to_bytes(8, "little")
            yield decode_pb2.DecodeEvent(tokens=tokens_to_proto(TokenBatch(index, (1,), text)))
        usage = Usage(len(opening.prompt_ids), count)
        yield decode_pb2.DecodeEvent(finish=finish_to_proto(Finish(LENGTH, usage)))

    def _admitted(self, opening: decode_pb2.DecodeOpen) -> decode_pb2.Admitted:
        ids = tuple(opening.prompt_ids)
        identity = HandoffIdentity(self.contract.digest(), None, opening.tenant, prompt_digest(ids), 0, len(ids))
        ticket = Ticket(secrets.token_bytes(16), 1, bytes(16), secrets.token_bytes(32), 60_000, 0, (Endpoint("-:1"),))
        return decode_pb2.Admitted(
            ticket=ticket_to_proto(ticket),
            identity=identity_to_proto(identity),
            contract=contract_to_proto(self.contract),
        )


class Stubs:
    """Workers that serve and report as real ones do: each with a port, a connection and heartbeats of its own."""

    def __init__(self) -> None:
        self.addresses: list[str] = []  # a prefill worker's, a decode worker's, and so on
        self._stack = AsyncExitStack()

    async def start(self, router: str, pairs: int) -> None:
        """Starts `pairs` workers of each role, and registers them with the router's registry."""
        for number in range(pairs):
            for role in (PREFILL, DECODE):
                address = await self._serve(role)
                self.addresses.append(address)
                registry = RpcRegistry(router, timeout_s=10.0)
                self._stack.push_async_callback(registry.close)
                record = stub_record(f"{role}-{number}", role, address)
                heartbeat = Heartbeat(registry, lambda record=record: record, SETTINGS)  # type: ignore[misc]
                await heartbeat.start()
                self._stack.push_async_callback(heartbeat.stop)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _serve(self, role: str) -> str:
        server = Server()
        if role == PREFILL:
            server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, StubPrefill())
        else:
            server.add(decode_pb2_grpc.add_DecodeServicer_to_server, StubDecode())
        self._stack.push_async_callback(server.stop)
        return await server.start()


def stub_record(worker_id: str, role: str, address: str) -> WorkerRecord:
    endpoint = (Endpoint(address),)
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        incarnation=secrets.token_bytes(16),
        state=READY,
        model=MODEL,
        endpoints=endpoint,
        transfer=endpoint if role == DECODE else (),
        contract=CONTRACT,
        load=Load(pages_total=1 << 16, waiting_limit=1 << 16),
        lease_s=SETTINGS.lease_s,
    )
