"""A prefill worker behind real gRPC, and a decode side of its own: tickets, receiver, pages, Transfer server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from torch import Tensor

from cache_transfer.contract import Endpoint, HandoffIdentity, Ticket, WorkerContract, prompt_digest
from cache_transfer.pages import PageSink, Range
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.service import TransferService
from cache_transfer.service import register as register_transfer
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.wire import contract_to_proto, identity_to_proto, ticket_to_proto
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine, OnLayer
from pdserve.engine.handover import SequenceSink
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepOutput, StepPlan
from pdserve.errors import PdserveError
from pdserve.registry.records import Registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.engine.tiny import tiny_engine, tiny_model

WAIT_S = 10.0


@dataclass
class Received:
    """A cache that arrived whole."""

    pages: tuple[int, ...]
    logits: ReceivedLogits
    report: ReceiveReport


class GatedSink:
    """Stops before the first write until `gate` is set; `reached` says that it has stopped."""

    def __init__(self, sink: PageSink, reached: Callable[[], None], gate: threading.Event) -> None:
        self._sink, self._reached, self._gate = sink, reached, gate

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self._reached()
        assert self._gate.wait(WAIT_S)
        self._sink.write(plane, layer, heads, tokens, payload)


class DecodeSide:
    """Implements ReceiverHost over an engine's cache; page size and axis order are its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.contract: WorkerContract = engine.contract()
        self.blocks = BlockManager(engine.config.pages, engine.config.page_size)
        self.book = TicketBook(secrets.token_bytes(16), 30.0, ())
        self.receiver = Receiver(self.book, self.contract, self, ReceiverSettings(threads=1))
        self.server = Server()
        self.server.add(register_transfer, TransferService(self.receiver))
        self.received: dict[bytes, Received] = {}
        self.aborts: list[PdserveError] = []
        self.refusal: PdserveError | None = None  # raised instead of granting
        self.granting = asyncio.Event()  # a push asks for pages
        self.may_grant = asyncio.Event()
        self.may_grant.set()
        self.writing = asyncio.Event()  # a frame is about to be written
        self.may_write = threading.Event()
        self.may_write.set()
        self._pages: dict[bytes, tuple[int, ...]] = {}

    async def start(self) -> None:
        self.book._endpoints = (Endpoint(await self.server.start()),)

    async def stop(self) -> None:
        self.may_grant.set()
        self.may_write.set()
        await self.server.stop()
        await asyncio.to_thread(self.receiver.close)

    def ticket(
        self, ids: Sequence[int], tenant: str = "t", *, held: int = 0, logits_only: bool = False
    ) -> tuple[Ticket, HandoffIdentity]:
        digest = prompt_digest(tuple(ids))
        identity = HandoffIdentity(self.contract.digest(), None, tenant, digest, held, len(ids))
        return self.book.issue("r", identity, held, logits_only), identity

    async def grant(self, claim: Claim) -> PageSink:
        self.granting.set()
        await self.may_grant.wait()
        if self.refusal is not None:
            raise self.refusal
        owner = claim.handoff_id.hex()
        pages = () if claim.logits_only else self.blocks.allocate(owner, self.blocks.pages_for(claim.end))
        self._pages[claim.handoff_id] = pages
        sink = SequenceSink(self.engine.cache, pages, *((0, 0) if claim.logits_only else (claim.start, claim.end)))
        loop = asyncio.get_running_loop()

        def reached() -> None:
            loop.call_soon_threadsafe(self.writing.set)

        return GatedSink(sink, reached, self.may_write)

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self.received[claim.handoff_id] = Received(self._pages[claim.handoff_id], logits, report)

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self.blocks.release(claim.handoff_id.hex())
        self.aborts.append(error)

    def cache(self, handoff_id: bytes, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, d] as they arrived."""
        return self.engine.cache.sequence(layer, self.received[handoff_id].pages, length)


class GatedEngine(Engine):
    """A real engine that stops in every layer of a step of `stop_at` chunks or more, until it is opened.

    Make it on the test's loop.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, stop_at: int) -> None:
        super().__init__(model, config)
        self._loop = asyncio.get_running_loop()
        self._gate = threading.Event()
        self._stop_at = stop_at
        self.reached = asyncio.Event()  # it has stopped
        self.layers_run = 0  # in steps that stop

    def open(self) -> None:
        self._gate.set()

    def step(self, plan: StepPlan, *, on_layer: OnLayer | None = None, **options: Any) -> StepOutput:
        def watched(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)
            if len(plan.chunks) >= self._stop_at:
                self.layers_run += 1
                self._loop.call_soon_threadsafe(self.reached.set)
                assert self._gate.wait(WAIT_S)

        return super().step(plan, on_layer=watched, **options)


def gated_engine(stop_at: int = 1) -> GatedEngine:
    config = EngineConfig(dtype="fp32", pages=64, page_size=4, deterministic=True)
    return GatedEngine(tiny_model(), config, stop_at)


@dataclass
class Rig:
    worker: PrefillWorker
    decode: DecodeSide
    stub: Any  # Prefill
    workers: Any  # Worker
    channel: grpc.aio.Channel
    tickets: list[Ticket] = field(default_factory=list)

    def request(
        self,
        ids: Sequence[int],
        *,
        output: Sequence[int] = (),
        held: int = 0,
        logits_only: bool = False,
        tenant: str = "t",
        **changes: Any,
    ) -> prefill_pb2.RunRequest:
        """What a router sends for a prompt that the decode side admitted."""
        ticket, identity = self.decode.ticket((*ids, *output), tenant, held=held, logits_only=logits_only)
        self.tickets.append(ticket)
        fields: dict[str, Any] = {
            "request_id": "r",
            "tenant": tenant,
            "prompt_ids": ids,
            "output_ids": output,
            "ticket": ticket_to_proto(ticket),
            "identity": identity_to_proto(identity),
            "decode_contract": contract_to_proto(self.decode.contract),
            "logits_only": logits_only,
        }
        return prefill_pb2.RunRequest(**{**fields, **changes})

    async def send(self, request: prefill_pb2.RunRequest, timeout: float = WAIT_S) -> prefill_pb2.RunResponse:
        """Calls Run; raises the typed error."""
        return await self.outcome(self.stub.Run(request, timeout=timeout))

    async def run(self, ids: Sequence[int], **options: Any) -> tuple[prefill_pb2.RunResponse, bytes]:
        """One whole prefill and handoff: (response, handoff id)."""
        request = self.request(ids, **options)
        return await self.send(request), request.ticket.handoff_id

    def start(self, request: prefill_pb2.RunRequest) -> Any:
        """The same call, running; `outcome` awaits it."""
        return self.stub.Run(request, timeout=WAIT_S)

    async def outcome(self, call: Any) -> prefill_pb2.RunResponse:
        """Raises the typed error."""
        try:
            response = await asyncio.wait_for(call, WAIT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        assert isinstance(response, prefill_pb2.RunResponse)
        return response

    async def until(self, holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Looks at the worker between calls of its own Describe RPC until something holds."""
        async with asyncio.timeout(within_s):
            while not holds():
                await self.workers.Describe(worker_pb2.DescribeRequest())

    async def until_waiting(self, count: int) -> None:
        await self.until(lambda: len(self.worker.pipeline.scheduler.waiting) == count)

    async def until_dropped(self) -> None:
        """A running prompt was told to end."""
        await self.until(lambda: any(p.dropped for p in self.worker.pipeline.scheduler.running))

    async def idle(self, within_s: float = WAIT_S) -> None:
        """Returns when the worker has no prompt; then nothing is held."""
        await asyncio.wait_for(self.worker.pipeline.quiet.wait(), within_s)
        self.worker.blocks.check_integrity()
        assert self.worker.blocks.held_count == 0
        assert not self.worker.blocks.holdings()
        assert self.worker.pipeline.scheduler.idle


@asynccontextmanager
async def rig(
    *,
    prefill: Engine | None = None,
    decode: Engine | None = None,
    registry: Registry | None = None,
    heartbeat_s: float = 1.0,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Starts both sides; at the end checks that neither leaked, and stops them."""
    torch.set_num_threads(1)
    worker = PrefillWorker(
        prefill or tiny_engine(deterministic=True),
        None,
        PrefillSettings(
            registry=RegistrySettings(heartbeat_s=heartbeat_s),
            **{"reap_s": 0.02, "grace_s": 1.0, "chunk_tokens": 16, "max_running": 4, **settings},
        ),
        registry,
    )
    side = DecodeSide(decode or tiny_engine(page_size=8, pages=64, axis_order="nhd", deterministic=True))
    await side.start()
    address = await worker.start()
    try:
        async with channel(address) as to_worker:
            stub = prefill_pb2_grpc.PrefillStub(to_worker)
            made = Rig(worker, side, stub, worker_pb2_grpc.WorkerStub(to_worker), to_worker)
            yield made
            await made.idle()
            assert not worker.broken.is_set()
    finally:
        await worker.stop()
        await side.stop()
    for handoff_id in side.received:
        side.blocks.release(handoff_id.hex())
    side.blocks.check_integrity()
    assert side.blocks.held_count == 0 and side.receiver.active == 0


@dataclass
class Local:
    """What one process computes for a prompt: K and V per layer, and the logits of the last token."""

    planes: list[tuple[Tensor, Tensor]]
    logits: bytes


def local(engine: Engine, ids: Sequence[int], chunk_tokens: int = 10**9) -> Local:
    """The same prompt on an engine of its own, in the same chunks."""
    blocks = BlockManager(engine.config.pages, engine.config.page_size)
    pages = blocks.allocate("local", blocks.pages_for(len(ids)))
    for start in range(0, len(ids), chunk_tokens):
        chunk = Chunk("local", tuple(ids[start : start + chunk_tokens]), start, pages)
        logits = engine.step(StepPlan((chunk,))).logits["local"]
    planes = [engine.cache.sequence(layer, pages, len(ids)) for layer in range(engine.spec.layers)]
    return Local(planes, logits[-1].numpy().tobytes())


def check_equal(made: Rig, handoff_id: bytes, expected: Local, start: int = 0) -> None:
    """Received cache [start, end) and logits are bit for bit those of the local run."""
    length = expected.planes[0][0].shape[1]
    for layer, planes in enumerate(expected.planes):
        for got, wanted in zip(made.decode.cache(handoff_id, layer, length), planes, strict=True):
            assert torch.equal(got[:, start:], wanted[:, start:]), f"layer {layer}"
    assert made.decode.received[handoff_id].logits.data == expected.logits
