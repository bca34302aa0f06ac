"""A registry behind gRPC: a router that serves its own, used by workers and other routers."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from pdserve.errors import DeadlineExceeded, InvalidRequest, Unavailable
from pdserve.registry.records import LiveRecord, Load, WorkerRecord
from pdserve.registry.wire import live_from_proto, load_to_proto, record_to_proto
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings, check_plaintext, split_address
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc

log = logging.getLogger(__name__)


class RpcRegistry:
    """One event loop: that of the first call. Connects on first use, and again after an outage."""

    def __init__(self, address: str, timeout_s: float = 2.0, rpc: RpcSettings | None = None) -> None:
        """`address` is host:port. Raises ConfigError for a malformed one, or one that plaintext may not reach."""
        self.address = address
        self._rpc = rpc or RpcSettings()
        check_plaintext(split_address(address)[0], self._rpc)
        self._timeout_s = timeout_s
        self._pool: ChannelPool | None = None

    async def register(self, record: WorkerRecord) -> None:
        await self._call("Register", pb.RegisterRequest(record=record_to_proto(record)))

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        request = pb.HeartbeatRequest(
            worker_id=worker_id, incarnation=incarnation, state=state, load=load_to_proto(load)
        )
        await self._call("Heartbeat", request)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        await self._call("Deregister", pb.DeregisterRequest(worker_id=worker_id, incarnation=incarnation))

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        """See Registry. A record that cannot be read is left out, with a warning in the log."""
        answer = await self._call("Snapshot", pb.SnapshotRequest())
        return tuple(live for record in answer.records if (live := _read(record)) is not None)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _call(self, method: str, request: Any) -> Any:
        if self._pool is None:
            self._pool = ChannelPool(self._rpc)
        stub = registry_pb2_grpc.RegistryStub(self._pool.get(self.address))
        try:
            return await getattr(stub, method)(request, timeout=self._timeout_s)
        except grpc.RpcError as failed:
            error = from_rpc_error(failed, self.address)
        if isinstance(error, DeadlineExceeded):
            raise Unavailable(
                f"the registry at {self.address} did not answer within {self._timeout_s:g} s",
                reason="REGISTRY_UNAVAILABLE",
                field="registry.url",
                remedy="check the router there, or correct registry.url",
            )
        raise error


def _read(record: pb.WorkerRecord) -> LiveRecord | None:
    try:
        return live_from_proto(record)
    except InvalidRequest as error:
        log.warning("a worker record cannot be read and is left out: %r: %s", record.status.worker_id, error)
        return None
