"""What a worker reaches, found out when an operator asks (`Worker/Probe`): its registry, and the Transfer listeners
of the decode workers that its registry knows.

Addresses come from the registry alone, each gets one new connection and one question to its health service, and one
probe runs at a time. So the call cannot be used to look around in a network: it says of a fixed list whether it can be
reached, and who may write that list could be pushed to anyway.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import Exhausted, PdserveError
from pdserve.registry.records import DECODE, Registry
from pdserve.registry.timed import timed_snapshot
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import from_rpc_error

DEFAULT_S, MAX_S = 2.0, 30.0
MAX_PATHS = 256


@dataclass(frozen=True)
class Path:
    """One way to a Transfer listener."""

    decode_worker: str
    address: str
    ms: float
    error: PdserveError | None = None


@dataclass(frozen=True)
class Reached:
    """What a probe found."""

    registry_ms: float = 0.0
    registry_error: PdserveError | None = None
    paths: tuple[Path, ...] = ()
    left_out: int = 0  # listeners beyond MAX_PATHS


class Prober:
    """Of one worker; belongs to its event loop.

    Args:
        registry: the worker's own; None: it announces itself nowhere.
        pushes: it hands caches over, so that ways to decode workers matter.
    """

    def __init__(self, registry: Registry | None, rpc: RpcSettings, *, pushes: bool) -> None:
        self._registry = registry
        self._rpc = rpc
        self.tls = rpc.tls  # this worker's own files
        self._pushes = pushes
        self._one_at_a_time = asyncio.Lock()

    async def probe(self, limit_s: float) -> Reached:
        """Takes at most about three times `limit_s`: its turn, the registry, all ways together.

        Raises Exhausted (PROBE_RUNNING) when other probes have not ended by then.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise Exhausted(
                "another probe is running here", reason="PROBE_RUNNING", remedy="ask again", retry_after_ms=1000
            ) from None
        try:
            return await self._probe(limit_s)
        finally:
            self._one_at_a_time.release()

    async def _probe(self, limit_s: float) -> Reached:
        if self._registry is None:
            return Reached()
        records, ms, error = await timed_snapshot(self._registry, limit_s)
        ways = [
            (live.record.worker_id, endpoint.address)
            for live in records
            if self._pushes and live.record.role == DECODE
            for endpoint in live.record.transfer
            if endpoint.transport == "grpc"
        ]
        asked = ways[:MAX_PATHS]
        paths = await asyncio.gather(*(self._try(worker_id, address, limit_s) for worker_id, address in asked))
        return Reached(ms, error, tuple(paths), len(ways) - len(asked))

    async def _try(self, worker_id: str, address: str, limit_s: float) -> Path:
        """A connection of its own: one that stands says nothing of whether a new one could be made."""
        began = time.monotonic()
        try:
            async with channel(address, self._rpc) as link:
                stub = health_pb2_grpc.HealthStub(link)
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=limit_s)
                except grpc.RpcError as error:
                    raise from_rpc_error(error, address) from error
        except PdserveError as error:
            return Path(worker_id, address, _ms_since(began), error)
        return Path(worker_id, address, _ms_since(began))


def _ms_since(began: float) -> float:
    return 1000 * (time.monotonic() - began)
