"""The Operator service: what `pdserve doctor` asks of a router.

Workers are asked through the router's own connections, so the answer is about the way that requests take, wherever
the operator stands. Where tenants are known by keys, only operators (auth.py) may ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from pdserve.errors import PdserveError, Refused
from pdserve.registry.records import Registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.timed import timed_snapshot
from pdserve.rpc.convert import attempt_to_proto
from pdserve.rpc.deadline import limit_of, remaining_s
from pdserve.rpc.self_report import GRPC, HTTP, certificate, clock_ms, part_report
from pdserve.rpc.server import Server
from pdserve.rpc.status import to_detail
from pdserve.v1 import operator_pb2, operator_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.auth import Authenticator, check_grpc_operator
from router.canary import Canaries
from router.channels import WorkerChannels
from router.gate import Member
from router.pool import Pool
from router.settings import RouterSettings
from router.wire import call_error, connected, settled

OPERATOR_SERVICE = "pdserve.v1.Operator"  # the service's full name
DEFAULT_S, MAX_S = 5.0, 60.0
CANARY_S = 30.0  # where the caller sets no deadline
PROBE_SHARE = 0.3  # of a worker's time for each of the three waits of its probe

Context = grpc.aio.ServicerContext[Any, Any]


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """Serve it behind a `router.auth.Doorkeeper`."""

    def __init__(
        self,
        pool: Pool,
        canaries: Canaries,
        channels: WorkerChannels,
        settings: RouterSettings,
        authenticator: Authenticator,
        registry: Registry,
    ) -> None:
        self._pool = pool
        self._canaries = canaries
        self._channels = channels
        self._settings = settings
        self._authenticator = authenticator
        self._registry = registry.reader() if isinstance(registry, RedisRegistry) else registry

    async def Examine(
        self, request: operator_pb2.ExamineRequest, context: Context
    ) -> AsyncIterator[operator_pb2.ExaminePart]:
        check_grpc_operator(self._settings, self._authenticator, "examine this deployment", context)
        limit_s = limit_of(request.timeout_ms, DEFAULT_S, MAX_S)
        tasks = [asyncio.create_task(self._worker(member, limit_s)) for member in self._pool.members()]
        try:
            yield operator_pb2.ExaminePart(router=await self._router(limit_s))
            for answered in asyncio.as_completed(tasks):
                yield operator_pb2.ExaminePart(worker=await answered)
        finally:
            for task in tasks:
                await settled(task)

    async def Canary(self, request: operator_pb2.CanaryRequest, context: Context) -> operator_pb2.CanaryResponse:
        check_grpc_operator(self._settings, self._authenticator, "send canaries", context)
        limit_s = 0.9 * remaining_s(context, CANARY_S)  # so that the caller hears of it
        sung = await self._canaries.sing(request.prefill_worker, request.decode_worker, limit_s)
        return operator_pb2.CanaryResponse(
            token_ids=sung.ids,
            gaps=sung.gaps,
            attempt=attempt_to_proto(sung.attempt),
            error=None if sung.error is None else to_detail(sung.error),
        )

    async def _router(self, limit_s: float) -> operator_pb2.RouterReport:
        _, ms, error = await timed_snapshot(self._registry, limit_s)
        tls = self._settings.rpc.tls
        listeners = ((GRPC, tls), (HTTP, self._settings.http_tls)) if tls.enabled else ()
        own = [await asyncio.to_thread(certificate, name, files) for name, files in listeners]
        return operator_pb2.RouterReport(
            part=part_report(tuple(own)),
            registry_ms=ms,
            registry_error=None if error is None else to_detail(error),
        )

    async def _worker(self, member: Member, limit_s: float) -> operator_pb2.WorkerReport:
        """What it says, or why it does not."""
        report = operator_pb2.WorkerReport(worker_id=member.id, suspect=self._pool.is_suspect(member))
        probe = worker_pb2.ProbeRequest(timeout_ms=max(1, round(1000 * PROBE_SHARE * limit_s)))
        accounts = asyncio.create_task(self._ask(member, "Accounts", worker_pb2.AccountsRequest(), limit_s))
        try:
            report.probe.CopyFrom(await self._ask(member, "Probe", probe, limit_s))
            report.clock_ms = clock_ms()
            report.accounts.CopyFrom(await accounts)
            check_same(member, report.probe)
        except PdserveError as error:
            report.error.CopyFrom(to_detail(error))
        finally:
            await settled(accounts)
        return report

    async def _ask(self, member: Member, method: str, request: Any, limit_s: float) -> Any:
        with connected(self._channels, member.address) as channel:
            call: Callable[..., Awaitable[Any]] = getattr(worker_pb2_grpc.WorkerStub(channel), method)
            try:
                return await call(request, timeout=limit_s)
            except grpc.RpcError as error:
                raise call_error(error, member.address) from error


def check_same(member: Member, probe: worker_pb2.ProbeResponse) -> None:
    """Raises Refused (STALE_RECORD) when somebody else answers at the record's address."""
    if (probe.worker_id, probe.incarnation) == (member.id, member.record.incarnation):
        return
    raise Refused(
        f"{probe.worker_id} answers at {member.address}, in another boot than the record's",
        reason="STALE_RECORD",
        field="worker_id",
        remedy="wait for the old record's lease to end; give every worker an id of its own",
    )


def add_operator(server: Server, service: OperatorService) -> None:
    """Adds the service to a server that has not started yet."""
    server.add(operator_pb2_grpc.add_OperatorServicer_to_server, service)
