"""What the two pools do differently; `PoolWorker` is what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from prometheus_client.registry import Collector

from cache_transfer.contract import Endpoint
from pdserve.registry.records import Load
from pdserve.worker.accounts import Stake
from pdserve.worker.parts import Requests
from pdserve.worker.service import KernelReport


class PoolHooks(ABC):
    pipeline: Requests
    takes_prompts = False
    """A decode worker that computes prompts itself when a router asks it to."""
    capabilities: frozenset[str] = frozenset()
    """See `WorkerRecord`."""

    @abstractmethod
    async def _listen(self) -> None:
        """Binds what must be bound before requests come. Raises ConfigError."""

    @abstractmethod
    async def _close(self, wait: bool) -> None:
        """Closes connections and threads. Not `wait`: what hangs is left behind."""

    @abstractmethod
    def _load(self) -> Load: ...

    @abstractmethod
    def _transfer_endpoints(self) -> tuple[Endpoint, ...]: ...

    @abstractmethod
    def _stakes(self) -> tuple[Stake, ...]:
        """What every live request holds, or may come and take."""

    @abstractmethod
    def kernels(self) -> KernelReport: ...

    @abstractmethod
    def _collector(self) -> Collector:
        """What its metrics page shows."""
