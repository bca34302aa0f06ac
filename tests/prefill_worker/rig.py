"""A prefill worker behind real gRPC, and a decode side of its own (decode_side.py)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from torch import Tensor

from cache_transfer.contract import Ticket
from cache_transfer.wire import contract_to_proto, identity_to_proto, ticket_to_proto
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.layered import OnLayer
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepOutput, StepPlan
from pdserve.registry.records import Registry
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.engine.tiny import tiny_engine, tiny_model
from tests.prefill_worker.decode_side import WAIT_S, DecodeSide


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
            async with asyncio.timeout(WAIT_S):
                response = await call
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
        async with asyncio.timeout(within_s):
            await self.worker.pipeline.quiet.wait()
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
