"""Serves any registry over gRPC. Every record is checked before it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.errors import DeadlineExceeded, Exhausted
from pdserve.registry.memory import MAX_WORKERS
from pdserve.registry.records import Registry
from pdserve.registry.wire import (
    MAX_LEASE_MS,
    RECORDS_A_TURN,
    check_incarnation,
    check_state,
    check_worker_id,
    live_to_proto,
    load_from_proto,
    record_from_proto,
)
from pdserve.rpc.background import in_turns
from pdserve.rpc.server import Server
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

SILENT_S = MAX_LEASE_MS / 1000  # a stream that asks for no answer for longer than any lease is ended


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """Typed errors become statuses in the server that this is added to (see `pdserve.rpc.served`)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reports = 0  # streams of heartbeats that are open, at most MAX_WORKERS

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        await self._registry.register(record_from_proto(request.record), again=request.again)
        return pb.RegisterResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        await self._renew(request)
        return pb.HeartbeatResponse()

    # Written by hand and not a generator: this runs once for every heartbeat of every worker.
    async def Report(self, requests: AsyncIterator[pb.HeartbeatRequest], context: Context) -> None:
        if self._reports >= MAX_WORKERS:
            raise Exhausted(f"{MAX_WORKERS} workers report on streams already", remedy="use Heartbeat")
        self._reports += 1
        answer, loop = pb.HeartbeatResponse(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SILENT_S) as silence:
                async for request in requests:
                    await self._renew(request)
                    if request.answer:
                        await context.write(answer)
                        silence.reschedule(loop.time() + SILENT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no heartbeat asked for an answer within {SILENT_S:g} s", remedy="register again"
            ) from None
        finally:
            self._reports -= 1

    async def _renew(self, request: pb.HeartbeatRequest) -> None:
        await self._registry.heartbeat(
            check_worker_id(request.worker_id),
            check_incarnation(request.incarnation),
            check_state(request.state),
            load_from_proto(request.load),
        )

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        await self._registry.deregister(check_worker_id(request.worker_id), check_incarnation(request.incarnation))
        return pb.DeregisterResponse()

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        live = await self._registry.snapshot()
        return pb.SnapshotResponse(records=[live_to_proto(each) async for each in in_turns(live, RECORDS_A_TURN)])


def add_registry(server: Server, registry: Registry) -> None:
    """Adds the service to a server that has not started yet."""
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryService(registry))
