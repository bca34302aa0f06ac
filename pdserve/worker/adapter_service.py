"""The Adapters service of a worker: its shelf over gRPC. Nothing is decided here."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from pdserve.errors import CheckpointError, InvalidRequest, NotFound
from pdserve.v1 import adapters_pb2, adapters_pb2_grpc, common_pb2
from pdserve.worker.adapters import AdapterShelf, AdapterStatus

Context = grpc.aio.ServicerContext[Any, Any]


class AdapterHost(Protocol):
    """A worker, on its event loop."""

    worker_id: str
    role: str
    model: str
    adapters: AdapterShelf

    def check_serving(self) -> None: ...


class AdapterService(adapters_pb2_grpc.AdaptersServicer):
    def __init__(self, host: AdapterHost) -> None:
        self._host = host

    async def Load(self, request: adapters_pb2.LoadAdapterRequest, context: Context) -> adapters_pb2.AdaptersResponse:
        self._check(request.model)
        shelf = self._host.adapters
        try:
            await shelf.load(request.name, shelf.locate(request.path))
        except CheckpointError as error:  # a caller's path led there
            raise InvalidRequest(error.message, reason=error.reason, field=error.field, remedy=error.remedy) from error
        return self._answer()

    async def Unload(
        self, request: adapters_pb2.UnloadAdapterRequest, context: Context
    ) -> adapters_pb2.AdaptersResponse:
        self._check(request.model)
        await self._host.adapters.unload(request.name, request.wait_ms / 1000)
        return self._answer()

    async def List(self, request: adapters_pb2.ListAdaptersRequest, context: Context) -> adapters_pb2.AdaptersResponse:
        self._check(request.model)
        return self._answer()

    def _check(self, name: str) -> None:
        self._host.check_serving()
        if name and name != self._host.model:
            raise NotFound(
                f"this worker serves {self._host.model!r}, not {name!r}",
                reason="UNKNOWN_MODEL",
                field="model",
                remedy="ask a worker of that model",
            )

    def _answer(self) -> adapters_pb2.AdaptersResponse:
        host = self._host
        worker = adapters_pb2.WorkerAdapters(
            worker_id=host.worker_id,
            role=host.role,
            model=host.model,
            adapters=[_to_proto(status) for status in host.adapters.status()],
        )
        return adapters_pb2.AdaptersResponse(workers=[worker])


def _to_proto(status: AdapterStatus) -> common_pb2.LoadedAdapter:
    return common_pb2.LoadedAdapter(
        name=status.name, digest=status.digest, users=status.users, rank=status.rank, size_bytes=status.size
    )
