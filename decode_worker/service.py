"""`Decode` over gRPC: protobuf in, the worker's own types inside, protobuf out. Nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from cache_transfer.contract import Ticket, WorkerContract
from cache_transfer.waiting import settle
from cache_transfer.wire import (
    contract_from_proto,
    contract_to_proto,
    difference_to_proto,
    identity_to_proto,
    ticket_to_proto,
)
from decode_worker.admission import Admission, DecodeRequest, Output, expected_identity
from decode_worker.sequence import Sequence, State
from decode_worker.stream import Event
from decode_worker.tracing import GenerateTrace, generating
from pdserve.errors import Cancelled, DeadlineExceeded, Internal, InvalidRequest, PdserveError
from pdserve.request import check_request_id
from pdserve.rpc.convert import finish_to_proto, sampling_from_proto, tokens_to_proto
from pdserve.rpc.deadline import remaining_s
from pdserve.rpc.events import Finish, Prefilled, TokenBatch
from pdserve.rpc.server import Server
from pdserve.rpc.status import to_detail
from pdserve.v1 import adapters_pb2_grpc, decode_pb2, decode_pb2_grpc, worker_pb2_grpc
from pdserve.worker.adapter_service import AdapterService
from pdserve.worker.service import WorkerService

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[decode_pb2.DecodeRequest]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Generate(self, requests: Requests, context: Context) -> None:
        with generating(self._worker.traces, self._worker.worker_id, context.invocation_metadata()) as trace:
            await self._generate(requests, context, trace)

    async def _generate(self, requests: Requests, context: Context, trace: GenerateTrace) -> None:
        request = request_from_proto(await self._first(requests), self._worker.contract)
        if request.sampling.grammar is not None:
            await self._worker.pipeline.prepare(request.sampling.grammar)
        sequence, admission, ticket = self._worker.submit(
            request, remaining_s(context, self._worker.settings.generate_s)
        )
        trace.sequence = sequence
        retries = asyncio.create_task(self._take_retries(requests, sequence), name=f"retries of {sequence.key}")
        try:
            if ticket is not None or sequence.here:  # else it is done already
                await self._write(context, self._admitted(sequence, admission, ticket))
            while not sequence.stream.over:
                try:
                    event = await sequence.stream.next()
                except PdserveError as error:
                    await self._write(context, decode_pb2.DecodeEvent(error=to_detail(error)))
                    raise
                await self._write(context, event_to_proto(event))
        finally:
            # Without effect on a sequence that has ended; otherwise the caller has gone.
            self._worker.pipeline.end(sequence, State.ABORTED, Cancelled("the caller closed the stream"))
            retries.cancel()
            await settle((retries,))

    async def _write(self, context: Context, event: decode_pb2.DecodeEvent) -> None:
        """Raises DeadlineExceeded when the reader has kept its window closed for `reader_s`."""
        limit_s = self._worker.settings.reader_s
        try:
            async with asyncio.timeout(limit_s):
                await context.write(event)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the reader took no message for {limit_s:g} s",
                reason="SLOW_READER",
                field="decode.reader_s",
                remedy="read the stream faster",
            ) from None

    async def _first(self, requests: Requests) -> decode_pb2.DecodeOpen:
        limit_s = self._worker.settings.rpc.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async for message in requests:
                    if message.WhichOneof("request") == "open":
                        return message.open
                    break
        except TimeoutError:
            raise DeadlineExceeded(
                f"no opening came within {limit_s:g} s",
                field="open",
                remedy="send `open` as the first message, at once",
            ) from None
        raise InvalidRequest(
            "the first message must be `open`", reason="MISSING_FIELD", field="open", remedy="send `open` first"
        )

    async def _take_retries(self, requests: Requests, sequence: Sequence) -> None:
        """Serves the caller's later messages; one that is wrong ends the request. A half-closed stream is fine."""
        try:
            async for message in requests:
                if message.WhichOneof("request") != "retry":
                    raise InvalidRequest(
                        "only `retry` may follow `open`",
                        reason="UNEXPECTED_MESSAGE",
                        field="request",
                        remedy="send nothing but `retry` after it",
                    )
                if message.retry.prefill_here:
                    await self._worker.pipeline.compute_here(sequence)
                else:
                    await self._worker.pipeline.retry(sequence, contract_from_proto(message.retry.prefill_contract))
        except PdserveError as error:
            self._worker.pipeline.end(sequence, State.FAILED, error)
        except grpc.aio.BaseError:
            return  # the call is over; Generate ends the sequence
        except Exception:
            log.exception("%s: reading the caller's messages failed", sequence.key)
            self._worker.pipeline.end(sequence, State.FAILED, Internal("the server failed", remedy="see its log"))

    def _admitted(self, sequence: Sequence, admission: Admission, ticket: Ticket | None) -> decode_pb2.DecodeEvent:
        contract = self._worker.contract
        identity = sequence.identity or expected_identity(sequence.request, contract, 0)
        return decode_pb2.DecodeEvent(
            admitted=decode_pb2.Admitted(
                ticket=None if ticket is None else ticket_to_proto(ticket),
                identity=identity_to_proto(identity),
                contract=contract_to_proto(contract),
                logits_only=sequence.logits_only,
                conversions=[difference_to_proto(d) for d in admission.conversions],
                prefill_here=ticket is None,
            )
        )


def request_from_proto(proto: decode_pb2.DecodeOpen, contract: WorkerContract) -> DecodeRequest:
    """Raises InvalidRequest naming the field that is missing or malformed.

    Args:
        contract: this worker's own, by which it computes a prompt itself.
    """
    check_request_id(proto.request_id)
    if proto.prefill_here and proto.HasField("prefill_contract"):
        raise InvalidRequest(
            "is set where no handoff is wanted",
            reason="UNEXPECTED_FIELD",
            field="prefill_contract",
            remedy="send the contract, or prefill_here",
        )
    if not proto.prefill_here and not proto.HasField("prefill_contract"):
        raise InvalidRequest(
            "is missing", reason="MISSING_FIELD", field="prefill_contract", remedy="send the prefill worker's contract"
        )
    sampling = sampling_from_proto(proto.sampling)
    if sampling.seed is None:
        raise InvalidRequest(
            "is missing", reason="MISSING_FIELD", field="sampling.seed", remedy="fix a seed, so that retries agree"
        )
    return DecodeRequest(
        request_id=proto.request_id,
        model=proto.model,
        tenant=proto.tenant,
        adapter=proto.adapter_digest if proto.HasField("adapter_digest") else None,
        prompt_ids=tuple(proto.prompt_ids),
        output_ids=tuple(proto.output_ids),
        forwarded_tokens=proto.forwarded_tokens,
        sampling=sampling,
        prefill_contract=contract if proto.prefill_here else contract_from_proto(proto.prefill_contract),
        here=proto.prefill_here,
        choices=tuple(Output(c.choice, tuple(c.output_ids), c.forwarded_tokens) for c in proto.choices),
        handoff_tokens=proto.handoff_tokens,
    )


def event_to_proto(event: Event) -> decode_pb2.DecodeEvent:
    if isinstance(event, TokenBatch):
        return decode_pb2.DecodeEvent(tokens=tokens_to_proto(event))
    if isinstance(event, Finish):
        return decode_pb2.DecodeEvent(finish=finish_to_proto(event))
    if isinstance(event, Prefilled):
        return decode_pb2.DecodeEvent(prefilled=decode_pb2.Prefilled(**vars(event)))
    return decode_pb2.DecodeEvent(ticket=ticket_to_proto(event))


def add_services(server: Server, worker: DecodeWorker) -> None:
    """Decode and Worker, on a server that has not started yet."""
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, DecodeService(worker))
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerService(worker))
    server.add(adapters_pb2_grpc.add_AdaptersServicer_to_server, AdapterService(worker))
