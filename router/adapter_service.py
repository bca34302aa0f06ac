"""The Adapters service of a router: an operator's call goes to every ready worker of the model.

What one worker refuses is told beside what the others did; the same call again repairs it. A name is taken away from
the decode workers first: they know a request from its beginning to its end, so when they are free of an adapter,
nobody needs it at the prefill workers either. Where tenants are known by keys, only operators (auth.py) may change or
see anything here; others read the names that they may use from Gateway/ListModels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from pdserve.errors import PdserveError, Unavailable, shown
from pdserve.registry.records import DECODE
from pdserve.rpc.server import Server
from pdserve.rpc.status import to_detail
from pdserve.v1 import adapters_pb2, adapters_pb2_grpc
from router.adapters import UNKNOWN_ADAPTER
from router.auth import Authenticator, check_grpc_operator
from router.channels import WorkerChannels
from router.gate import Member
from router.pool import Pool
from router.settings import RouterSettings
from router.wire import call_error, connected

ADAPTERS = "pdserve.v1.Adapters"  # the service's full name
LOAD_S = 300.0  # for a worker to read an adapter, where the caller leaves as much
MARGIN_S = 5.0  # for a worker's answer after its own time is over

Context = grpc.aio.ServicerContext[Any, Any]
Call = Callable[[Any], Awaitable[adapters_pb2.AdaptersResponse]]  # a stub's call


class RouterAdapterService(adapters_pb2_grpc.AdaptersServicer):
    """Serve it behind a `router.auth.Doorkeeper`.

    Args:
        model_of: the served model that a request's name means; raises what intake raises.
    """

    def __init__(
        self,
        pool: Pool,
        channels: WorkerChannels,
        settings: RouterSettings,
        authenticator: Authenticator,
        model_of: Callable[[str], str],
    ) -> None:
        self._pool = pool
        self._channels = channels
        self._settings = settings
        self._authenticator = authenticator
        self._model_of = model_of

    async def Load(self, request: adapters_pb2.LoadAdapterRequest, context: Context) -> adapters_pb2.AdaptersResponse:
        check_grpc_operator(self._settings, self._authenticator, "change which adapters are served", context)
        members = self._members(self._model_of(request.model))
        asked = adapters_pb2.LoadAdapterRequest(name=request.name, path=request.path)
        return await self._changed(await self._ask(members, "Load", asked, LOAD_S))

    async def Unload(
        self, request: adapters_pb2.UnloadAdapterRequest, context: Context
    ) -> adapters_pb2.AdaptersResponse:
        check_grpc_operator(self._settings, self._authenticator, "change which adapters are served", context)
        members = self._members(self._model_of(request.model))
        asked = adapters_pb2.UnloadAdapterRequest(name=request.name, wait_ms=request.wait_ms)
        limit_s = request.wait_ms / 1000 + MARGIN_S
        decodes = [member for member in members if member.record.role == DECODE]
        others = [member for member in members if member.record.role != DECODE]
        answers = await self._ask(decodes, "Unload", asked, limit_s)
        if any(answer.HasField("error") and answer.error.reason != UNKNOWN_ADAPTER for answer in answers):
            rest = await self._ask(others, "List", adapters_pb2.ListAdaptersRequest(), MARGIN_S)
        else:
            rest = await self._ask(others, "Unload", asked, limit_s)
        return await self._changed([*answers, *rest])

    async def List(self, request: adapters_pb2.ListAdaptersRequest, context: Context) -> adapters_pb2.AdaptersResponse:
        check_grpc_operator(self._settings, self._authenticator, "see which worker serves which adapters", context)
        names = [self._model_of(request.model)] if request.model else list(self._pool.models())
        members = [member for name in names for member in self._pool.ready(name)]
        answers = await self._ask(members, "List", adapters_pb2.ListAdaptersRequest(), MARGIN_S)
        return _response(answers)

    def _members(self, model: str) -> tuple[Member, ...]:
        members = self._pool.ready(model)
        if not members:
            raise Unavailable(
                f"no worker is ready for model {shown(model)}",
                reason="NO_WORKER",
                field="model",
                remedy="start workers, or wait until they are ready",
            )
        return members

    async def _ask(
        self, members: Iterable[Member], method: str, request: Any, limit_s: float
    ) -> list[adapters_pb2.WorkerAdapters]:
        return list(await asyncio.gather(*(self._ask_one(m, method, request, limit_s) for m in members)))

    async def _ask_one(self, member: Member, method: str, request: Any, limit_s: float) -> adapters_pb2.WorkerAdapters:
        """What the worker says of itself, or why it did not do what was asked."""
        try:
            with connected(self._channels, member.address) as channel:
                call: Call = getattr(adapters_pb2_grpc.AdaptersStub(channel), method)
                try:
                    answer = await call(request, timeout=limit_s)  # type: ignore[call-arg]
                except grpc.RpcError as error:
                    raise call_error(error, member.address) from error
        except PdserveError as error:
            record = member.record
            return adapters_pb2.WorkerAdapters(
                worker_id=record.worker_id, role=record.role, model=record.model, error=to_detail(error)
            )
        return next(iter(answer.workers))

    async def _changed(self, answers: list[adapters_pb2.WorkerAdapters]) -> adapters_pb2.AdaptersResponse:
        """Whoever asked may name the adapter at once."""
        await self._pool.refresh()
        return _response(answers)


def _response(answers: Iterable[adapters_pb2.WorkerAdapters]) -> adapters_pb2.AdaptersResponse:
    ordered = sorted(answers, key=lambda each: each.worker_id)
    return adapters_pb2.AdaptersResponse(workers=ordered)


def add_adapters(server: Server, service: RouterAdapterService) -> None:
    """Adds the service to a server that has not started yet."""
    server.add(adapters_pb2_grpc.add_AdaptersServicer_to_server, service)
