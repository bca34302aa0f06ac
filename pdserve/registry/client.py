"""A registry behind gRPC: a router that serves its own, used by workers and other routers."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from pdserve.errors import DeadlineExceeded, InvalidRequest, Unavailable
from pdserve.registry.records import LiveRecord, Load, WorkerRecord
from pdserve.registry.report import Report
from pdserve.registry.wire import RECORDS_A_TURN, live_from_proto, load_to_proto, record_to_proto
from pdserve.rpc.background import in_turns
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings, check_plaintext, split_address
from pdserve.rpc.status import from_rpc_error
from pdserve.rpc.tls import ROUTER
from pdserve.v1 import registry_pb2 as pb
from pdserve.v1 import registry_pb2_grpc

log = logging.getLogger(__name__)

_NO_STREAM = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)


class RpcRegistry:
    """One event loop: that of the first call. Connects on first use, and again after an outage."""

    def __init__(self, address: str, timeout_s: float = 2.0, rpc: RpcSettings | None = None) -> None:
        """`address` is host:port. Raises ConfigError for a malformed one, or one that plaintext may not reach."""
        self.address = address
        self._rpc = rpc or RpcSettings()
        check_plaintext(split_address(address)[0], self._rpc)
        self._timeout_s = timeout_s
        self._pool: ChannelPool | None = None
        self._reports: dict[bytes, Report] = {}  # by incarnation
        self._streams = True  # heartbeats are on streams; not with an older router

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        await self._call("Register", pb.RegisterRequest(record=record_to_proto(record), again=again))

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        request = pb.HeartbeatRequest(
            worker_id=worker_id, incarnation=incarnation, state=state, load=load_to_proto(load)
        )
        if not (self._streams and await self._reported(request)):
            await self._call("Heartbeat", request)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        if (report := self._reports.pop(incarnation, None)) is not None:
            report.close()
        await self._call("Deregister", pb.DeregisterRequest(worker_id=worker_id, incarnation=incarnation))

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        """See Registry. A record that cannot be read is left out, with a warning in the log."""
        answer = await self._call("Snapshot", pb.SnapshotRequest())
        read = [_read(record) async for record in in_turns(answer.records, RECORDS_A_TURN)]
        return tuple(live for live in read if live is not None)

    async def close(self) -> None:
        for report in self._reports.values():
            report.close()
        if self._pool is not None:
            await self._pool.close()

    async def _reported(self, request: pb.HeartbeatRequest) -> bool:
        """Sends it on the worker's stream. False: this router takes none, or no more of them."""
        report = self._reports.setdefault(request.incarnation, Report())
        try:
            await report.send(self._stub(), request, self._timeout_s)
        except TimeoutError:
            raise self._late() from None
        except grpc.RpcError as failed:
            if failed.code() in _NO_STREAM:
                self._streams = False
                return False
            raise from_rpc_error(failed, self.address) from None
        return True

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=self._timeout_s)
        except grpc.RpcError as failed:
            error = from_rpc_error(failed, self.address)
        if isinstance(error, DeadlineExceeded):
            error = self._late()
        if isinstance(error, Unavailable):
            self._streams = True  # whoever serves there next may be newer
        raise error

    def _stub(self) -> Any:
        if self._pool is None:
            self._pool = ChannelPool(self._rpc, peer=ROUTER)
        return registry_pb2_grpc.RegistryStub(self._pool.get(self.address))

    def _late(self) -> Unavailable:
        return Unavailable(
            f"the registry at {self.address} did not answer within {self._timeout_s:g} s",
            reason="REGISTRY_UNAVAILABLE",
            field="registry.url",
            remedy="check the router there, or correct registry.url",
        )


def _read(record: pb.WorkerRecord) -> LiveRecord | None:
    try:
        return live_from_proto(record)
    except InvalidRequest as error:
        log.warning("a worker record cannot be read and is left out: %r: %s", record.status.worker_id, error)
        return None
