"""What prefill and decode workers have in common: the way from start to end, health, and the registry record.

    STARTING --start()--> READY --drain()--> DRAINING --stop()--> gone
                          |   ^ `--a background task dies--^  (`broken` is set)
          a step takes    |   |
          over stall_s    v   |  the step ends
                         STALLED

Only READY serves: health and the registry say so at once, so routers send work elsewhere. A
worker that stalls ends the requests it has with a retryable error, since nobody knows when the
step will end; pages that it writes stay held until then. Every wait on the way to the end has a
limit; what is left after it is logged and abandoned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from cache_transfer.contract import Endpoint, WorkerContract
from pdserve.errors import Internal, PdserveError, Refused, Unavailable
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DRAINING, PREFILL, READY, STALLED, STARTING, Registry, WorkerRecord
from pdserve.rpc.background import Background, set_within
from pdserve.rpc.server import Server
from pdserve.telemetry.traces import Traces
from pdserve.worker.accounts import Accounts, take_stock
from pdserve.worker.adapters import AdapterShelf, Readable
from pdserve.worker.adapters import Store as AdapterStore
from pdserve.worker.hooks import PoolHooks
from pdserve.worker.metrics_page import WorkerMetrics
from pdserve.worker.parts import Books, Steps
from pdserve.worker.probe import Prober
from pdserve.worker.settings import CommonSettings
from pdserve.worker.trace import TracedRun

log = logging.getLogger(__name__)

SETTLE_S = 5.0  # for a running step, writers and tasks to end once they were told to
HUNG_S = 1.0  # the same for a step that has had more than SETTLE_S already
STREAM_GRACE_S = 1.0  # for streams to deliver their last event when the worker stops


class PoolWorker(PoolHooks):
    """One worker: start(), then requests, then drain() and stop(). Belongs to the event loop that calls `start`.

    Subclasses set `pipeline` before `start`.
    """

    def __init__(
        self,
        role: str,
        model: str,
        contract: WorkerContract,
        bundle: bytes,
        settings: CommonSettings,
        registry: Registry | None,
        thread: Steps,
        books: Books,
        store: AdapterStore,
        read_adapter: Callable[[Path], Readable],
    ) -> None:
        """`store` and `read_adapter` are the engine's, see adapters.py."""
        self.role = role
        self.model = model
        self.contract = contract
        self.worker_id = settings.worker_id or f"{role}-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_bytes(16)
        self.traces = Traces(settings.telemetry, role, self.worker_id)
        self.broken = asyncio.Event()
        """Set when a background task died of a fault of ours: the process should be replaced."""
        self.hung = False
        """The engine's thread could not be ended; nothing but force ends its process."""
        self.stalled = False
        """The running step takes longer than `stall_s`; a process that stays so should be replaced."""
        self.adapters = AdapterShelf(
            store,
            read_adapter,
            lambda: self.pipeline.adapters_in_use,
            self._announce,
            settings.adapter_root,
            settings.max_adapters,
            settings.adapter_linger_s,
        )
        self._phase = STARTING
        self._abandoned = False  # a limit on the way to the end was passed
        self._serving = False  # what health says
        self._bundle = bundle
        self._common = settings
        self._steps = thread
        self._books = books
        self._server = Server(settings.rpc, settings.host, settings.port)
        self.prober = Prober(registry, settings.rpc, pushes=role == PREFILL)
        self._heartbeat = None if registry is None else Heartbeat(registry, self.record, settings.registry)
        self._metrics = WorkerMetrics(settings, self._collector())
        self._background = Background(self._on_death)

    # -- from start to end ---------------------------------------------------------------------

    async def start(self) -> str:
        """Binds, registers, serves. Returns the address.

        Raises:
            CheckpointError, InvalidRequest, Exhausted: an adapter of the settings cannot be served.
            ConfigError: a port is in use, an address is not allowed, or traces cannot be exported.
            Unavailable: the registry cannot be reached.
        """
        self.traces.open()
        try:
            for name, path in self._common.adapters.items():
                await self.adapters.load(name, Path(path))
            await self._listen()
            await self._metrics.start()
            await self._server.start(serving=False)
            self._background.spawn(self.pipeline.loop(), "loop")
            self._background.spawn(self._watch(), "reaper")
            self._phase = READY
            if self._heartbeat is not None:
                await self._heartbeat.start()
            await self._report()
        except PdserveError:
            await self.stop()
            raise
        return self.address

    async def drain(self, grace_s: float | None = None) -> None:
        """Leaves the registry, takes no new request, lets those here finish for `grace_s`, then ends them.

        Returns when every page is back, or at most SETTLE_S after the last request was told to end. Idempotent.
        """
        self._phase = DRAINING
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        await self._report()
        if not await set_within(self.pipeline.quiet, self._common.grace_s if grace_s is None else grace_s):
            log.warning("%s: the grace period is over, %d requests end", self.worker_id, self.pipeline.count)
        self.pipeline.end_all(self._not_serving())
        if not self._abandoned and not await set_within(self.pipeline.quiet, self._settle_s):
            self._abandoned = True
            log.error(
                "%s: %d requests with %d pages are abandoned: an engine step has been running for %.0f s",
                self.worker_id,
                self.pipeline.count,
                self._books.held_count,
                self._steps.busy_s,
            )

    async def stop(self) -> None:
        """Ends what is left and frees everything, each within a limit. Safe after a failed start. Idempotent."""
        await self.drain(0.0)
        await self._server.stop(STREAM_GRACE_S)
        if left := await self._background.stop(SETTLE_S):
            self._abandoned = True
            log.error("%s: tasks that do not end are abandoned: %s", self.worker_id, ", ".join(left))
        await self._metrics.stop()
        await self.traces.close()
        await self._close(wait=not self._abandoned)
        if not await asyncio.to_thread(self._steps.close, 0.0 if self._abandoned else self._settle_s):
            self.hung = True
            log.error("%s: an engine step that does not end is abandoned", self.worker_id)

    # -- what others see -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        return STALLED if self.stalled and self._phase == READY else self._phase

    @property
    def address(self) -> str:
        """host:port that others reach this worker by."""
        return self._common.advertise or self._server.address

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.incarnation,
            state=self.state,
            model=self.model,
            endpoints=(Endpoint(self.address),),
            transfer=self._transfer_endpoints(),
            contract=self.contract,
            load=self._load(),
            lease_s=self._common.registry.lease_s,
            takes_prompts=self.takes_prompts,
            capabilities=self.capabilities,
            adapters=self.adapters.named(),
            metrics=self._metrics.address(self.address),
        )

    @property
    def busy_s(self) -> float:
        """Seconds that the engine's running step has taken so far; 0: idle."""
        return self._steps.busy_s

    @property
    def heard(self) -> bool:
        """The registry takes its heartbeats, or there is none."""
        return self._heartbeat is None or not self._heartbeat.warning

    def bundle_bytes(self) -> bytes:
        return self._bundle

    def accounts(self) -> Accounts:
        """Where every page is, and who answers for it. Cached prefixes that nobody reads do not count as held."""
        return take_stock(self._books, self._stakes(), time.monotonic())

    async def trace(self, ids: tuple[int, ...], chunk_tokens: int, columns: int) -> TracedRun:
        """See `Worker/Trace`. Pools that can show their tensors override it."""
        raise Refused(
            f"a {self.role} worker does not show its tensors",
            reason="TRACE_OFF",
            field="allow_trace",
            remedy="ask a prefill worker that was started with allow_trace",
        )

    def check_serving(self) -> None:
        """Raises Unavailable unless the worker is READY."""
        if self.state != READY:
            raise self._not_serving()

    # -- inside --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ends what is overdue and watches the engine. Runs on a timer: it needs no traffic."""
        while True:
            await asyncio.sleep(self._common.reap_s)
            self.pipeline.reap(time.monotonic())
            self.adapters.reap(time.monotonic())
            await self._watch_engine()

    async def _watch_engine(self) -> None:
        stalled = self._steps.busy_s > self._common.stall_s
        if stalled == self.stalled:
            return
        self.stalled = stalled
        if stalled:
            log.error("%s: an engine step runs for %.0f s: not serving", self.worker_id, self._steps.busy_s)
            self.pipeline.end_all(self._not_serving())
        else:
            log.warning("%s: the engine moves again", self.worker_id)
        if self._heartbeat is not None:
            self._background.spawn(self._heartbeat.renew(), "news of the engine")
        await self._report()

    async def _announce(self) -> None:
        """Tells the registry what has changed in the record, if it has that already."""
        if self._heartbeat is not None and self._phase == READY:
            await self._heartbeat.renew()

    @property
    def _settle_s(self) -> float:
        """For the running step to end."""
        return HUNG_S if self._steps.busy_s > SETTLE_S else SETTLE_S

    async def _report(self) -> None:
        """Tells the health service."""
        serving = self.state == READY
        if serving != self._serving:
            self._serving = serving
            await self._server.set_serving(serving)

    def _on_death(self, name: str, error: BaseException) -> None:
        """A worker must not look alive when one of its tasks died of anything unexpected."""
        log.critical("%s: %s died", self.worker_id, name, exc_info=error)
        self._phase = DRAINING
        self.broken.set()
        self._background.spawn(self._report(), "health")
        self.pipeline.end_all(Internal(f"the {self.role} worker failed", remedy="see its log", retryable=True))

    def _not_serving(self) -> Unavailable:
        return Unavailable(
            f"this {self.role} worker is not serving: {self.state}",
            reason=self.state.upper(),
            remedy=f"send it to another {self.role} worker",
        )
