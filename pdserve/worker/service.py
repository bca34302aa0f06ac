"""The Worker service, which every worker of either pool answers in the same way.

A worker implements the small `WorkerHost` protocol; this module turns it into gRPC. All
methods run on the worker's event loop; all but `trace` only read.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from pdserve.errors import NotFound, PdserveError
from pdserve.registry.records import WorkerRecord
from pdserve.registry.wire import status_to_proto
from pdserve.rpc.deadline import limit_of
from pdserve.rpc.self_report import GRPC, certificate, disk_of, part_report
from pdserve.rpc.status import abort, to_detail
from pdserve.v1 import gateway_pb2, worker_pb2, worker_pb2_grpc
from pdserve.worker.accounts import Accounts
from pdserve.worker.probe import DEFAULT_S, MAX_S, Prober
from pdserve.worker.trace import TracedRun, trace_parts

PIECE_BYTES = 1 << 20  # of a tokenizer bundle, per message


@dataclass(frozen=True)
class KernelReport:
    """Which kernels compute, as engine/native/choice.py names the states."""

    state: str  # plain | building | native | failed
    why: str  # why they are not native
    folder: Path  # where compiled ones are kept


class WorkerHost(Protocol):
    """What a worker tells about itself. Called on the worker's event loop; must not block."""

    prober: Prober

    def record(self) -> WorkerRecord: ...

    def kernels(self) -> KernelReport: ...

    def bundle_bytes(self) -> bytes:
        """The tokenizer bundle whose digest the contract names; empty without a tokenizer."""
        ...

    def accounts(self) -> Accounts: ...

    async def trace(self, ids: tuple[int, ...], chunk_tokens: int, columns: int) -> TracedRun:
        """Runs a prompt to show its tensors. Raises Refused where that is off."""
        ...


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Describe, GetTokenizer, Accounts, Trace and Probe over a WorkerHost."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.WorkerStatus:
        record = self._host.record()
        return status_to_proto(record, record.lease_s)

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.BundlePiece]:
        try:
            data = self._bundle(request.digest)
        except PdserveError as error:
            await abort(context, error)
        for start in range(0, len(data), PIECE_BYTES):
            yield worker_pb2.BundlePiece(data=data[start : start + PIECE_BYTES], total_bytes=len(data))

    async def Accounts(
        self, request: worker_pb2.AccountsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AccountsResponse:
        accounts = self._host.accounts()
        return worker_pb2.AccountsResponse(
            pages_total=accounts.pages_total,
            pages_free=accounts.pages_free,
            pages_held=accounts.pages_held,
            pages_cached=accounts.pages_cached,
            holdings=[
                worker_pb2.Holding(owner=h.owner, kind=h.kind, pages=h.pages, deadline_left_s=h.deadline_left_s)
                for h in accounts.holdings
            ],
            intact=not accounts.fault,
            fault=accounts.fault,
            preemptions=accounts.preemptions,
            recomputed_tokens=accounts.recomputed_tokens,
            handoffs=accounts.handoffs,
            forks=accounts.forks,
            shared_pages=accounts.shared_pages,
            copied_pages=accounts.copied_pages,
        )

    async def Trace(
        self, request: worker_pb2.TraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.TracePart]:
        try:
            run = await self._host.trace(tuple(request.token_ids), request.chunk_tokens, request.columns)
        except PdserveError as error:
            await abort(context, error)
        for part in trace_parts(run):
            yield part

    async def Probe(
        self, request: worker_pb2.ProbeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ProbeResponse:
        reached = await self._host.prober.probe(limit_of(request.timeout_ms, DEFAULT_S, MAX_S))
        record, kernels, tls = self._host.record(), self._host.kernels(), self._host.prober.tls
        own = (await asyncio.to_thread(certificate, GRPC, tls),) if tls.enabled else ()
        disk = await asyncio.to_thread(lambda: shutil.disk_usage(disk_of(kernels.folder)))
        failed = reached.registry_error
        return worker_pb2.ProbeResponse(
            part=part_report(own),
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            lease_s=record.lease_s,
            registry_ms=reached.registry_ms,
            registry_error=None if failed is None else to_detail(failed),
            paths=[
                worker_pb2.PathReport(
                    decode_worker=path.decode_worker,
                    address=path.address,
                    ms=path.ms,
                    error=None if path.error is None else to_detail(path.error),
                )
                for path in reached.paths
            ],
            paths_left_out=reached.left_out,
            kernels=kernels.state,
            kernels_why=kernels.why,
            cache_folder=str(kernels.folder),
            cache_free_bytes=disk.free,
        )

    def _bundle(self, digest: bytes) -> bytes:
        own = self._host.record().contract.tokenizer_digest
        if not own or digest != own:
            raise NotFound(
                f"this worker has no tokenizer bundle {digest.hex()[:16] or 'without a digest'}",
                reason="UNKNOWN_BUNDLE",
                field="digest",
                remedy="ask for the tokenizer digest in the worker's contract",
            )
        return self._host.bundle_bytes()
