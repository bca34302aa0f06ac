"""The registry of a router that is a Serve deployment itself: its address is asked for, and again when it moved."""

from __future__ import annotations

import asyncio

from pdserve.cluster.notes import Notes
from pdserve.errors import Unavailable
from pdserve.registry.open import open_registry
from pdserve.registry.records import LiveRecord, Load, Registry, WorkerRecord
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings

_RETRY_S = 0.5


class FoundRegistry:
    """See Registry. One event loop. Connects on first use, and looks for the router anew after each failure."""

    def __init__(self, settings: RegistrySettings, rpc: RpcSettings, within_s: float = 0.0) -> None:
        """`within_s`: how long `register` waits for a router that is still starting."""
        self._settings = settings
        self._rpc = rpc
        self._within_s = within_s
        self._found: Registry | None = None

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        end = asyncio.get_running_loop().time() + self._within_s
        while True:
            try:
                return await (await self._registry()).register(record, again)
            except Unavailable:
                await self.close()
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        try:
            await (await self._registry()).heartbeat(worker_id, incarnation, state, load)
        except Unavailable:
            await self.close()
            raise

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        await (await self._registry()).deregister(worker_id, incarnation)

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        try:
            return await (await self._registry()).snapshot()
        except Unavailable:
            await self.close()
            raise

    async def close(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            await found.close()

    async def _registry(self) -> Registry:
        if self._found is None:
            address = await asyncio.to_thread(Notes("").router)
            if not address:
                raise Unavailable(
                    "no router is a deployment of this Serve, and no other registry is configured",
                    reason="NO_ROUTER",
                    field="registry.url",
                    remedy="deploy the router, too (args {pool: router}), or set registry.url",
                )
            self._found = open_registry(f"grpc://{address}", self._settings, self._rpc)
        return self._found
