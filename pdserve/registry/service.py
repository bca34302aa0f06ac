"""Serves any registry over gRPC. Every record is checked before it is taken."""

from __future__ import annotations

from typing import Any

import grpc

from pdserve.registry.records import Registry
from pdserve.registry.wire import (
    check_incarnation,
    check_state,
    check_worker_id,
    live_to_proto,
    load_from_proto,
    record_from_proto,
)
from pdserve.rpc.server import Server
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """Typed errors become statuses in the server that this is added to (see `pdserve.rpc.served`)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        await self._registry.register(record_from_proto(request.record))
        return pb.RegisterResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        await self._registry.heartbeat(
            check_worker_id(request.worker_id),
            check_incarnation(request.incarnation),
            check_state(request.state),
            load_from_proto(request.load),
        )
        return pb.HeartbeatResponse()

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        await self._registry.deregister(check_worker_id(request.worker_id), check_incarnation(request.incarnation))
        return pb.DeregisterResponse()

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        return pb.SnapshotResponse(records=[live_to_proto(live) for live in await self._registry.snapshot()])


def add_registry(server: Server, registry: Registry) -> None:
    """Adds the service to a server that has not started yet."""
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryService(registry))
