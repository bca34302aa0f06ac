"""A decode worker behind real gRPC, and a prefill side driven by hand: an engine and a sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import torch

from cache_transfer.contract import WorkerContract
from cache_transfer.sender import HandoffSender, SendReport
from cache_transfer.transport import GrpcTransport
from cache_transfer.wire import contract_to_proto, identity_from_proto, ticket_from_proto
from decode_worker.sequence import State
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.engine.engine import Engine
from pdserve.errors import DeadlineExceeded
from pdserve.local import LocalOutput, LocalRunner
from pdserve.registry.records import Registry
from pdserve.registry.settings import RegistrySettings
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.convert import finish_from_proto, sampling_to_proto, tokens_from_proto
from pdserve.rpc.events import Finish, TokenBatch
from pdserve.rpc.status import from_rpc_error
from pdserve.rpc.writing import write
from pdserve.tokenizer import Bundle
from pdserve.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.decode_worker.prefill_side import Computed, Prefill
from tests.engine.tiny import tiny_engine

WAIT_S = 10.0


@dataclass
class Answer:
    ids: tuple[int, ...] = ()
    text: bytes = b""
    batches: list[TokenBatch] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def logprobs(self) -> tuple[Any, ...]:
        return tuple(entry for batch in self.batches for entry in batch.logprobs)


class Call:
    """One Decode/Generate stream."""

    def __init__(self, rig: Rig, ids: tuple[int, ...], opening: decode_pb2.DecodeOpen) -> None:
        self.rig = rig
        self.ids = ids  # what prefill computes
        self._opening = opening
        self.call = rig.stub.Generate(timeout=30)

    async def __aenter__(self) -> Call:
        await self.send(open=self._opening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()

    async def send(self, **message: Any) -> None:
        try:
            await write(self.call, decode_pb2.DecodeRequest(**message).SerializeToString())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def event(self) -> decode_pb2.DecodeEvent:
        """The next event; raises the call's typed error."""
        try:
            async with asyncio.timeout(WAIT_S):
                event = await self.call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        assert isinstance(event, decode_pb2.DecodeEvent), "the stream ended"
        return event

    async def admitted(self) -> decode_pb2.Admitted:
        event = await self.event()
        assert event.WhichOneof("event") == "admitted", event
        return event.admitted

    async def ticket(self) -> common_pb2.Ticket:
        event = await self.event()
        assert event.WhichOneof("event") == "ticket", event
        return event.ticket

    async def answer(self) -> Answer:
        """Reads to the finish; raises the call's error, which must equal its error event."""
        answer = Answer()
        failed: common_pb2.ErrorDetail | None = None
        while answer.finish is None:
            event = await self.event_after(failed)
            match event.WhichOneof("event"):
                case "tokens":
                    batch = tokens_from_proto(event.tokens)
                    answer.batches.append(batch)
                    answer.ids += batch.ids
                    answer.text += batch.text
                case "finish":
                    answer.finish = finish_from_proto(event.finish)
                case "error":
                    failed = event.error
                case other:
                    raise AssertionError(f"unexpected {other}")
        return answer

    async def event_after(self, failed: common_pb2.ErrorDetail | None) -> decode_pb2.DecodeEvent:
        if failed is None:
            return await self.event()
        try:
            await self.event()
        except Exception as error:
            # The caller's own deadline may end the call first, without the worker's detail.
            own = isinstance(error, DeadlineExceeded) and failed.reason == "GENERATE_TIMEOUT"
            assert own or getattr(error, "reason", None) == failed.reason, (error, failed)
            raise
        raise AssertionError("an error event must be the last one")


class States(logging.Handler):
    """Lets a test wait until some sequence has reached a state, as the worker's own log tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[State, asyncio.Event] = {state: asyncio.Event() for state in State}

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        state = record.args[2]
        assert isinstance(state, State)
        self.reached[state].set()

    async def wait(self, state: State) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.reached[state].wait()


class Rig:
    """`worker` and everything needed to drive it."""

    def __init__(
        self, worker: DecodeWorker, prefill: Prefill, decode: grpc.aio.Channel, push: grpc.aio.Channel
    ) -> None:
        self.worker = worker
        self.prefill = prefill
        self.stub = decode_pb2_grpc.DecodeStub(decode)
        self.about = worker_pb2_grpc.WorkerStub(decode)
        self.decode = decode
        self.transport = GrpcTransport(push)
        self.states = States()

    def call(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        contract: WorkerContract | None = None,
        output: Sequence[int] = (),
        forwarded: int | None = None,
        **fields: Any,
    ) -> Call:
        opening = decode_pb2.DecodeOpen(
            request_id=fields.pop("request_id", "r"),
            prompt_ids=ids,
            output_ids=output,
            forwarded_tokens=len(output) if forwarded is None else forwarded,
            sampling=sampling_to_proto(params),
            prefill_contract=contract_to_proto(contract or self.prefill.contract),
            **{"tenant": "t", **fields},
        )
        return Call(self, (*ids, *output), opening)

    def sender(
        self,
        admitted: decode_pb2.Admitted,
        computed: Computed,
        ticket: common_pb2.Ticket | None = None,
        **changes: Any,
    ) -> HandoffSender:
        """A sender that has everything to send, or only the first `layers`; `run` it."""
        layers = changes.pop("layers", self.prefill.engine.spec.layers)
        logits = changes.pop("logits", computed.logits)
        sender = HandoffSender(
            changes.pop("transport", self.transport),
            ticket_from_proto(ticket or admitted.ticket),
            changes.pop("identity", None) or identity_from_proto(admitted.identity),
            changes.pop("contract", self.prefill.contract),
            changes.pop("source", computed.source),
            logits_only=admitted.logits_only,
            **{"deadline_s": WAIT_S, **changes},
        )
        for layer in range(layers):
            start = admitted.identity.start
            sender.computed(layer, (start, len(computed.ids)))
        if layers == self.prefill.engine.spec.layers:
            sender.logits(computed.dtype, logits, len(computed.ids) - 1)
        return sender

    async def push(self, admitted: decode_pb2.Admitted, computed: Computed, **changes: Any) -> SendReport:
        async with asyncio.timeout(WAIT_S):
            return await self.sender(admitted, computed, **changes).run()

    async def generate(self, ids: Sequence[int], params: SamplingParams, **options: Any) -> Answer:
        """The whole path: admit, compute, push, read to the end."""
        async with self.call(ids, params, **options) as call:
            admitted = await call.admitted()
            await self.push(admitted, self.prefill.compute(call.ids))
            return await call.answer()

    async def describe_until(self, holds: Callable[[], bool]) -> None:
        """Asks the worker about itself until something holds inside it: each turn is a whole RPC."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await self.about.Describe(worker_pb2.DescribeRequest())

    async def empty(self) -> None:
        """Waits until no sequence is left, then checks every account."""
        async with asyncio.timeout(1.0):
            await self.worker.pipeline.quiet.wait()
        self.worker.blocks.check_integrity()
        assert self.worker.blocks.held_count == 0
        assert not self.worker.blocks.holdings()
        assert not self.worker.pipeline.scheduler.grants
        assert len(self.worker.pipeline.handoffs.book) == 0 and not self.worker.pipeline.handoffs._sequences


@asynccontextmanager
async def rig(
    *,
    decode: Engine | None = None,
    prefill: Engine | None = None,
    bundle: Bundle | None = None,
    registry: Registry | None = None,
    announced: RegistrySettings | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Starts a worker; at the end checks that nothing leaked, and stops it."""
    torch.set_num_threads(1)
    logger = logging.getLogger("decode_worker.sequence")
    logger.setLevel(logging.DEBUG)
    engine = decode or tiny_engine(deterministic=True)
    own = prefill or tiny_engine(deterministic=True, pages=512)
    given = {"reap_s": 0.02, "grace_s": 1.0, "registry": announced or RegistrySettings(), **settings}
    worker = DecodeWorker(engine, bundle, DecodeSettings(**given), registry)
    source = Prefill(own)
    if bundle is not None:
        source.contract = own.contract(bundle.digest())
    await worker.start()
    try:
        async with channel(worker.address) as to_decode, channel(worker.transfer_address) as to_transfer:
            made = Rig(worker, source, to_decode, to_transfer)
            logger.addHandler(made.states)
            try:
                yield made
            finally:
                logger.removeHandler(made.states)
            await made.empty()
    finally:
        await worker.stop()


def local(prompts: Sequence[Sequence[int]], params: SamplingParams, bundle: Bundle | None = None) -> list[LocalOutput]:
    """What one process answers."""
    return LocalRunner(tiny_engine(deterministic=True), bundle, chunk_tokens=5).generate_batch(prompts, params)
