"""Decode workers that say what a test has written: for what a model with random weights would never write.

A second implementation of the Decode service, over real gRPC; a router with `disaggregate = never` needs no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cache_transfer.contract import Endpoint, HandoffIdentity, prompt_digest
from cache_transfer.wire import contract_to_proto, identity_to_proto
from pdserve.errors import PdserveError
from pdserve.registry.records import CHOICES, DECODE, GRAMMAR, SPECIAL_TOKENS, Load
from pdserve.rpc.convert import finish_to_proto, tokens_to_proto
from pdserve.rpc.events import Finish, TokenBatch, Usage
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle, Tokenizer
from pdserve.tokenizer.detokenizer import IncrementalDetokenizer
from pdserve.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.app import Router
from tests.router.support import contract, record, router_settings

ROOM = Load(pages_total=512, waiting_limit=8)


@dataclass
class ScriptedDecode(decode_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    """Answers every request with `says`, choice k with its k-th text, a token at a time, then breaks, if it has to."""

    bundle: Bundle
    says: Sequence[str] = ("",)
    breaks: PdserveError | None = None
    asked: list[decode_pb2.DecodeOpen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer(self.bundle)
        size = self.bundle.vocab_size
        self.contract = contract(tokenizer_digest=self.bundle.digest(), vocab_size=size, context_limit=4096)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.BundlePiece]:
        data = self.bundle.to_bytes()
        yield worker_pb2.BundlePiece(data=data, total_bytes=len(data))

    async def Generate(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        opening = (await anext(aiter(requests))).open
        self.asked.append(opening)
        ids = tuple(opening.prompt_ids)
        identity = HandoffIdentity(self.contract.digest(), None, opening.tenant, prompt_digest(ids), 0, len(ids))
        admitted = decode_pb2.Admitted(
            identity=identity_to_proto(identity), contract=contract_to_proto(self.contract), prefill_here=True
        )
        yield decode_pb2.DecodeEvent(admitted=admitted)
        yield decode_pb2.DecodeEvent(prefilled=decode_pb2.Prefilled(computed_tokens=len(ids), chunks=1))
        outputs = [list(self._output(opening, choice)) for choice in range(len(opening.choices) or 1)]
        for events in outputs:
            for batch in events:
                yield decode_pb2.DecodeEvent(tokens=tokens_to_proto(batch))
        if self.breaks is not None:
            raise self.breaks
        for choice, batches in enumerate(outputs):
            whole = len(batches) == len(self.tokenizer.encode(self.says[choice], add_special=False))
            usage = Usage(len(ids), len(batches))
            finish = Finish("stop" if whole else "length", usage, choice=choice)
            yield decode_pb2.DecodeEvent(finish=finish_to_proto(finish))

    def _output(self, opening: decode_pb2.DecodeOpen, choice: int) -> list[TokenBatch]:
        shows_special = not opening.sampling.skip_special_tokens
        text = IncrementalDetokenizer(self.tokenizer, special=shows_special)
        ids = self.tokenizer.encode(self.says[choice], add_special=False)[: opening.sampling.max_tokens]
        return [TokenBatch(n, (token,), text.push(token), choice=choice) for n, token in enumerate(ids)]


@asynccontextmanager
async def scripted(peers: dict[str, ScriptedDecode]) -> AsyncIterator[Router]:
    """A router in front of a worker for each model; at the end no request may be left."""
    async with AsyncExitStack() as stack:
        router = Router(router_settings(disaggregate="never"))
        await router.start()
        stack.push_async_callback(router.stop)
        for name, peer in peers.items():
            server = Server()
            server.add(decode_pb2_grpc.add_DecodeServicer_to_server, peer)
            server.add(worker_pb2_grpc.add_WorkerServicer_to_server, peer)
            endpoints = (Endpoint(await server.start()),)
            stack.push_async_callback(server.stop)
            ready = record(name, DECODE, peer.contract, model=name, endpoints=endpoints, lease_s=120.0)
            every = frozenset({CHOICES, GRAMMAR, SPECIAL_TOKENS})
            able = dataclasses.replace(ready, takes_prompts=True, load=ROOM, capabilities=every)
            await router.registry.register(able)
        await router.pool.refresh()
        yield router
        assert router.orchestrator.active == 0
