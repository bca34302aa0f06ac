"""`Prefill` over gRPC: protobuf in, the worker's own types inside, protobuf out. Nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from cache_transfer.wire import contract_from_proto, identity_from_proto, ticket_from_proto
from pdserve.errors import InvalidRequest
from pdserve.registry.records import PREFILL
from pdserve.request import check_request_id
from pdserve.rpc.deadline import remaining_s
from pdserve.rpc.server import Server
from pdserve.telemetry.context import enter, received
from pdserve.v1 import adapters_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2_grpc
from pdserve.worker.adapter_service import AdapterService
from pdserve.worker.service import WorkerService
from prefill_worker.admission import PrefillRequest

if TYPE_CHECKING:
    from prefill_worker.worker import PrefillWorker


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Run(
        self, request: prefill_pb2.RunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.RunResponse:
        enter(received(context.invocation_metadata(), PREFILL, self._worker.worker_id))
        deadline_s = remaining_s(context, self._worker.settings.lease_s)
        result = await self._worker.run(request_from_proto(request), deadline_s)
        return prefill_pb2.RunResponse(
            computed_tokens=result.computed_tokens,
            cached_tokens=result.cached_tokens,
            sent_tokens=result.sent_tokens,
            bytes_sent=result.bytes_sent,
            frames_sent=result.frames_sent,
            queued_ms=result.queued_ms,
            prefill_ms=result.prefill_ms,
            transfer_ms=result.transfer_ms,
            push_ms=result.push_ms,
            chunks=result.chunks,
        )


def request_from_proto(proto: prefill_pb2.RunRequest) -> PrefillRequest:
    """Raises InvalidRequest naming the field that is missing or malformed."""
    check_request_id(proto.request_id)
    for name in ("ticket", "identity", "decode_contract"):
        if not proto.HasField(name):
            raise InvalidRequest(
                "is missing", reason="MISSING_FIELD", field=name, remedy="send what the decode worker answered"
            )
    return PrefillRequest(
        request_id=proto.request_id,
        model=proto.model,
        tenant=proto.tenant,
        adapter=proto.adapter_digest if proto.HasField("adapter_digest") else None,
        prompt_ids=tuple(proto.prompt_ids),
        output_ids=tuple(proto.output_ids),
        ticket=ticket_from_proto(proto.ticket),
        identity=identity_from_proto(proto.identity),
        logits_only=proto.logits_only,
        decode_contract=contract_from_proto(proto.decode_contract),
    )


def add_services(server: Server, worker: PrefillWorker) -> None:
    """Adds Prefill and Worker to a server that has not started yet."""
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillService(worker))
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerService(worker))
    server.add(adapters_pb2_grpc.add_AdaptersServicer_to_server, AdapterService(worker))
