"""The doctor's questions to a router, and their answers as plain values. Every wait has a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from pdserve.client import AsyncClient
from pdserve.client.failures import typed_errors
from pdserve.client.request import credentials
from pdserve.client.status import Worker
from pdserve.doctor.observed import Books, Examined, Observed, Part, Probe, RouterSeen, Song, Way
from pdserve.errors import Internal, PdserveError, Refused, Unavailable
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.convert import attempt_from_proto
from pdserve.rpc.self_report import GRPC, Certificate, certificate, clock_ms
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import from_detail
from pdserve.rpc.tls import ROUTER
from pdserve.v1 import common_pb2, operator_pb2, operator_pb2_grpc, worker_pb2

ROOM_S = 2.0  # beyond the limit that the router keeps, for its answer to come
ORPHAN = "orphan"  # a kind of holding


class Doctor:
    """Asks one router. Use `doctor()`.

    Raises ConfigError for an address that cannot be, or that plaintext may not reach.
    """

    def __init__(self, client: AsyncClient, channels: ChannelPool, api_key: str, timeout_s: float) -> None:
        self._client = client
        self._stub: Any = operator_pb2_grpc.OperatorStub(channels.get(client.address))
        self._rpc = channels.settings
        self._metadata = credentials(api_key)
        self._timeout_s = timeout_s

    async def observe(self) -> Observed:
        """Everything but canaries. Raises what keeps the router from answering: a PdserveError."""
        status = await self._client.status(self._timeout_s)
        asked_ms = clock_ms()
        router, answered_ms, examined = await self._examine()
        own: tuple[Certificate, ...] = ()
        if self._rpc.tls.enabled:
            own = (await asyncio.to_thread(certificate, GRPC, self._rpc.tls),)
        known = {worker.worker_id for worker in status.workers}
        return Observed(
            gateway=self._client.address,
            status=status,
            router=router,
            examined={seen.worker_id: seen for seen in examined if seen.worker_id in known},
            asked_ms=asked_ms,
            answered_ms=answered_ms,
            own=own,
        )

    async def sing(self, prefill: Worker | None, decode: Worker) -> Song:
        """One canary; `prefill` None: the decode worker computes the prompt. What goes wrong is in the answer."""
        song = Song(prefill.worker_id if prefill else "", decode.worker_id)
        asked = operator_pb2.CanaryRequest(prefill_worker=song.prefill_worker, decode_worker=song.decode_worker)
        call: Callable[..., Awaitable[operator_pb2.CanaryResponse]] = self._stub.Canary
        try:
            with typed_errors(self._client.address, self._timeout_s):
                answer = await call(asked, timeout=self._timeout_s, metadata=self._metadata)
        except PdserveError as error:
            return replace(song, error=error)
        return replace(
            song,
            ids=tuple(answer.token_ids),
            gaps=tuple(answer.gaps),
            attempt=attempt_from_proto(answer.attempt),
            error=_error(answer, "error"),
        )

    async def _examine(self) -> tuple[RouterSeen, int, list[Examined]]:
        """The router, this machine's clock when it had answered, and the workers."""
        request = operator_pb2.ExamineRequest(timeout_ms=max(1, round(1000 * self._timeout_s)))
        router, answered_ms, examined = None, 0, []
        limit_s = 2 * self._timeout_s + ROOM_S  # the router looks at its registry, then waits for its workers
        call = self._stub.Examine(request, timeout=limit_s, metadata=self._metadata)
        try:
            with typed_errors(self._client.address, limit_s):
                async for part in call:
                    if part.WhichOneof("part") == "router":
                        router, answered_ms = _router(part.router), clock_ms()
                    else:
                        examined.append(_examined(part.worker))
        except Refused as error:
            if error.reason != "UNIMPLEMENTED":
                raise
            raise Unavailable(
                f"the router at {self._client.address} cannot be examined: it is of an older version",
                reason="OLDER_ROUTER",
                remedy="update it, or use the doctor of its own version",
            ) from None
        finally:
            call.cancel()
        if router is None:
            raise Internal("the router said nothing of itself", reason="NO_REPORT")
        return router, answered_ms, examined


@asynccontextmanager
async def doctor(gateway: str, rpc: RpcSettings, api_key: str, timeout_s: float) -> AsyncIterator[Doctor]:
    """For the running event loop; leaving closes every connection.

    Args:
        timeout_s: for each answer.
    """
    async with AsyncClient(gateway, rpc, api_key=api_key) as client:
        channels = ChannelPool(rpc, peer=ROUTER)
        try:
            yield Doctor(client, channels, api_key, timeout_s)
        finally:
            await channels.close()


def _router(message: operator_pb2.RouterReport) -> RouterSeen:
    return RouterSeen(_part(message.part), message.registry_ms, _error(message, "registry_error"))


def _examined(message: operator_pb2.WorkerReport) -> Examined:
    return Examined(
        worker_id=message.worker_id,
        suspect=message.suspect,
        clock_ms=message.clock_ms,
        probe=_probe(message.probe) if message.HasField("probe") else None,
        books=_books(message.accounts) if message.HasField("accounts") else None,
        error=_error(message, "error"),
    )


def _probe(message: worker_pb2.ProbeResponse) -> Probe:
    return Probe(
        part=_part(message.part),
        lease_s=message.lease_s,
        registry_ms=message.registry_ms,
        registry_error=_error(message, "registry_error"),
        ways=tuple(Way(p.decode_worker, p.address, p.ms, _error(p, "error")) for p in message.paths),
        ways_left_out=message.paths_left_out,
        kernels=message.kernels,
        kernels_why=message.kernels_why,
        cache_folder=message.cache_folder,
        cache_free_bytes=message.cache_free_bytes,
    )


def _part(message: worker_pb2.PartReport) -> Part:
    return Part(
        version=message.version,
        clock_ms=message.clock_ms,
        certificates=tuple(
            Certificate(c.listener, tuple(c.names), c.not_after_s, c.authority_not_after_s, _error(c, "error"))
            for c in message.certificates
        ),
    )


def _books(message: worker_pb2.AccountsResponse) -> Books:
    return Books(
        fault="" if message.intact else message.fault or "they do not agree",
        orphans=tuple(holding.owner for holding in message.holdings if holding.kind == ORPHAN),
        pages_total=message.pages_total,
        pages_held=message.pages_held,
    )


def _error(message: Any, field: str) -> PdserveError | None:
    detail: common_pb2.ErrorDetail = getattr(message, field)
    return from_detail(detail) if message.HasField(field) else None
