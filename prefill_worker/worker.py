"""The prefill worker: its servers, its place in the registry, its health, and its end.

    new --start()--> READY --drain()--> DRAINING --stop()--> gone
                       `---a background task dies----^  (health says so at once; `broken` is set)

One event loop owns server, channels, scheduler and page books; one engine thread runs steps. What
happens to a prompt is in pipeline.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from cache_transfer.contract import Endpoint
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.runner import EngineThread
from pdserve.errors import Cancelled, DeadlineExceeded, Internal, PdserveError, Unavailable
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DRAINING, PREFILL, READY, STARTING, Load, Registry, WorkerRecord
from pdserve.registry.worker_service import LEASE, Accounts, Holding
from pdserve.rpc.background import Background
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle
from prefill_worker import service
from prefill_worker.admission import Limits, PrefillRequest, check_request
from prefill_worker.handoff import PrefillResult
from prefill_worker.peers import Peers
from prefill_worker.pipeline import Pipeline
from prefill_worker.scheduler import Prompt, State
from prefill_worker.settings import PrefillSettings

log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker: start(), then run() for each prompt, then drain() and stop().

    Belongs to the event loop that calls `start`.

    Args:
        model: a loaded model, or an engine that nobody else steps meanwhile.
        bundle: the tokenizer bundle; None: the model has none.
        settings: checked here (raises ConfigError).
        registry: where to announce itself; None: nowhere. The caller closes it, after stop().
    """

    def __init__(
        self,
        model: LoadedModel | Engine,
        bundle: Bundle | None,
        settings: PrefillSettings,
        registry: Registry | None = None,
    ) -> None:
        settings.check()
        self.settings = settings
        self.engine = model if isinstance(model, Engine) else Engine(model, settings.engine)
        self.worker_id = settings.worker_id or f"prefill-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_bytes(16)
        self.model = settings.name or self.engine.name
        self.contract = self.engine.contract(bundle.digest() if bundle else b"", settings.context_limit)
        self.state = STARTING
        self.broken = asyncio.Event()
        """Set when a background task died of a fault of ours: the process should be replaced."""
        config, spec = self.engine.config, self.engine.spec
        self.blocks = BlockManager(config.pages, config.page_size)
        self._limits = Limits(
            model=self.model,
            contract=self.contract,
            context_limit=min(settings.context_limit or spec.context_limit, spec.context_limit),
            pages=config.pages,
            page_size=config.page_size,
        )
        self._bundle = bundle.to_bytes() if bundle else b""
        self._heartbeat = None if registry is None else Heartbeat(registry, self.record, settings.registry)
        self._server = Server(settings.rpc, settings.host, settings.port)
        service.add_services(self._server, self)
        self._thread = EngineThread(config.threads, name="prefill-engine")
        self._peers = Peers(settings.rpc)
        self._background = Background(self._on_death)
        self.pipeline = Pipeline(
            self.engine, self.contract, settings, self.blocks, self._thread, self._peers, self._background
        )
        self._closing = asyncio.Event()
        self._serving = False  # what health says

    async def start(self) -> str:
        """Binds, registers, serves. Returns the address.

        Raises:
            ConfigError: the port is in use, or the address is not allowed.
            Unavailable: the registry cannot be reached.
        """
        try:
            await self._server.start(serving=False)
            self._background.spawn(self.pipeline.loop(), "loop")
            self._background.spawn(self._reap(), "reaper")
            self.state = READY
            if self._heartbeat is not None:
                await self._heartbeat.start()
            await self._report(True)
        except PdserveError:
            await self.stop()
            raise
        return self.address

    async def run(self, request: PrefillRequest, deadline_s: float) -> PrefillResult:
        """Computes a prompt and hands it over; cancelling the caller stops the work.

        Raises:
            NotFound, InvalidRequest, Incompatible: see `check_request`; nothing was started.
            Exhausted: QUEUE_FULL. Unavailable: DRAINING, or decode is gone.
            DeadlineExceeded: the call's deadline, the ticket's time in the queue, or the lease.
            PdserveError: whatever the decode worker refused or failed with.
        """
        if self.state != READY:
            raise _not_serving()
        check_request(request, self._limits)
        job = self.pipeline.submit(request, deadline_s)
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            late = time.monotonic() >= job.prompt.deadline
            state = State.EXPIRED if late else State.ABORTED
            self.pipeline.end(job, state, Cancelled("the caller went away", reason="CALLER_GONE"))
            raise

    async def drain(self, grace_s: float | None = None) -> None:
        """Leaves the registry, takes no new prompt, lets those here finish for `grace_s`, then ends them.

        Returns when every page is back. Idempotent.
        """
        self.state = DRAINING
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        await self._report(False)
        try:
            async with asyncio.timeout(self.settings.grace_s if grace_s is None else grace_s):
                await self.pipeline.quiet.wait()
        except TimeoutError:
            log.warning("%s: the grace period is over, %d prompts end", self.worker_id, len(self.pipeline.jobs))
        for job in tuple(self.pipeline.jobs.values()):
            self.pipeline.end(job, State.ABORTED, _not_serving())
        await self.pipeline.quiet.wait()  # bounded by one step, which chunk_tokens bounds

    async def stop(self) -> None:
        """Ends what is left and frees everything. Safe after a failed start. Idempotent."""
        await self.drain(0.0)
        self._closing.set()
        self.pipeline.close()
        await self._background.join()
        await self._server.stop(0.0)
        await self._peers.close()
        await asyncio.to_thread(self._thread.close)

    @property
    def address(self) -> str:
        """host:port that others reach this worker by."""
        return self.settings.advertise or self._server.address

    def record(self) -> WorkerRecord:
        running, waiting = self.pipeline.scheduler.running, self.pipeline.scheduler.waiting
        load = Load(
            running=len(running),
            waiting=len(waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=self.pipeline.scheduler.queued_tokens,
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=self.pipeline.tokens_per_s,
            steps=self._thread.steps,
        )
        return WorkerRecord(
            worker_id=self.worker_id,
            role=PREFILL,
            incarnation=self.incarnation,
            state=self.state,
            model=self.model,
            endpoints=(Endpoint(self.address),),
            transfer=(),
            contract=self.contract,
            load=load,
            lease_s=self.settings.registry.lease_s,
        )

    def bundle_bytes(self) -> bytes:
        return self._bundle

    def accounts(self) -> Accounts:
        """Where every page is. Cached prefixes that nobody reads count as free to reuse, not as held."""
        now, fault = time.monotonic(), ""
        try:
            self.blocks.check_integrity()
        except Internal as error:
            fault = str(error)
        deadlines = {prompt.owner: prompt.deadline for prompt in self.pipeline.jobs}
        return Accounts(
            pages_total=self.blocks.pages,
            pages_free=self.blocks.free_count,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            holdings=tuple(
                Holding(owner, LEASE, len(pages), deadlines[owner] - now if owner in deadlines else -1.0)
                for owner, pages in self.blocks.holdings().items()
            ),
            fault=fault,
        )

    async def _reap(self) -> None:
        """Ends what is overdue and watches the engine. Runs on a timer: it needs no traffic."""
        while not self._closing.is_set():
            try:
                await asyncio.wait_for(self._closing.wait(), self.settings.reap_s)
            except TimeoutError:
                for prompt in self.pipeline.scheduler.overdue(time.monotonic()):
                    self.pipeline.end(self.pipeline.jobs[prompt], State.EXPIRED, _overdue(prompt))
                stalled = self._thread.busy_s > self.settings.stall_s
                if stalled and self._serving:
                    log.error("%s: an engine step runs for %.0f s: not serving", self.worker_id, self._thread.busy_s)
                await self._report(self.state == READY and not stalled)

    async def _report(self, serving: bool) -> None:
        """What the health service says."""
        if serving != self._serving:
            self._serving = serving
            await self._server.set_serving(serving)

    def _on_death(self, name: str, error: BaseException) -> None:
        """A worker must not look alive when one of its tasks died of anything unexpected."""
        log.critical("%s: %s died", self.worker_id, name, exc_info=error)
        self.state = DRAINING
        self.broken.set()
        self._background.spawn(self._report(False), "health")
        for job in tuple(self.pipeline.jobs.values()):
            failure = Internal("the prefill worker failed", remedy="see its log", retryable=True)
            self.pipeline.end(job, State.FAILED, failure)


def _not_serving() -> Unavailable:
    return Unavailable(
        "this prefill worker is not serving", reason="DRAINING", remedy="send it to another prefill worker"
    )


def _overdue(prompt: Prompt) -> DeadlineExceeded:
    if prompt.state is State.QUEUED:
        return DeadlineExceeded(
            "the prompt waited too long for its turn",
            reason="QUEUE_TIMEOUT",
            remedy="send it to another prefill worker, or add one",
            retryable=True,
        )
    return DeadlineExceeded(
        "the handoff did not end within its lease, or its caller's deadline",
        reason="LEASE_ENDED",
        remedy="check that the decode worker has free pages, or raise lease_s",
        retryable=True,
    )
