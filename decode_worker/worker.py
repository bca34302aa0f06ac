"""The decode worker: its two servers, its place in the registry, its health, and its end.

    new --start()--> READY --drain()--> DRAINING --stop()--> gone
                       `---a background task dies----^  (health says so at once; `broken` is set)

One event loop owns servers, scheduler, tickets and page books; one engine thread runs steps and
samples. What happens to a request is in pipeline.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from cache_transfer.contract import Endpoint, Ticket
from cache_transfer.service import TransferService
from cache_transfer.service import register as register_transfer
from decode_worker import service
from decode_worker.admission import Admission, DecodeRequest, Limits
from decode_worker.pipeline import Pipeline
from decode_worker.sequence import HANDOFF, Sequence, State
from decode_worker.settings import DecodeSettings
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.runner import EngineThread
from pdserve.errors import Internal, PdserveError, Unavailable
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DECODE, DRAINING, READY, STARTING, Load, Registry, WorkerRecord
from pdserve.registry.worker_service import GRANT, PIN, REQUEST, Accounts, Holding
from pdserve.rpc.background import Background
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle, Tokenizer

log = logging.getLogger(__name__)

STREAM_GRACE_S = 1.0  # for streams to deliver their last event when the worker stops


class DecodeWorker:
    """One decode worker: start(), then submit() for each request, then drain() and stop().

    Belongs to the event loop that calls `start`.

    Args:
        model: a loaded model, or an engine that nobody else steps.
        bundle: the tokenizer bundle; None: the model has none, and only ids are streamed.
        settings: checked here (raises ConfigError).
        registry: where to announce itself; None: nowhere. The caller closes it, after stop().
    """

    def __init__(
        self,
        model: LoadedModel | Engine,
        bundle: Bundle | None,
        settings: DecodeSettings,
        registry: Registry | None = None,
    ) -> None:
        settings.check()
        self.settings = settings
        self.engine = model if isinstance(model, Engine) else Engine(model, settings.engine)
        self.worker_id = settings.worker_id or f"decode-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_bytes(16)
        self.model = settings.name or self.engine.name
        self.contract = self.engine.contract(bundle.digest() if bundle else b"", settings.context_limit)
        self.state = STARTING
        self.broken = asyncio.Event()
        """Set when a background task died of a fault of ours: the process should be replaced."""
        config, spec = self.engine.config, self.engine.spec
        self.blocks = BlockManager(config.pages, config.page_size)
        limits = Limits(
            model=self.model,
            contract=self.contract,
            context_limit=min(settings.context_limit or spec.context_limit, spec.context_limit),
            pages=config.pages,
            page_size=config.page_size,
            eos_ids=tuple(sorted({*spec.eos_ids, *(bundle.eos_ids if bundle else ())})),
            has_text=bundle is not None,
        )
        self._bundle = bundle.to_bytes() if bundle else b""
        self._heartbeat = None if registry is None else Heartbeat(registry, self.record, settings.registry)
        self._server = Server(settings.rpc, settings.host, settings.port)
        self._transfer = Server(settings.rpc, settings.host, settings.transfer_port)
        self._thread = EngineThread(config.threads, name="decode-engine")
        self._background = Background(self._on_death)
        tokenizer = Tokenizer(bundle) if bundle else None
        self.pipeline = Pipeline(
            self.engine, limits, settings, self.blocks, self._thread, self._background, tokenizer, self.incarnation
        )
        service.add_services(self._server, self)
        self._transfer.add(register_transfer, TransferService(self.pipeline.handoffs.receiver))
        self._serving = False  # what health says

    async def start(self) -> str:
        """Binds both listeners, registers, serves. Returns the address of the Decode service.

        Raises:
            ConfigError: a port is in use, or an address is not allowed.
            Unavailable: the registry cannot be reached.
        """
        try:
            await self._transfer.start()
            await self._server.start(serving=False)
            self.pipeline.handoffs.endpoints = (Endpoint(self.transfer_address),)
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

    def submit(self, request: DecodeRequest) -> tuple[Sequence, Admission, Ticket | None]:
        """See `Pipeline.submit`; raises Unavailable besides, when the worker does not serve."""
        if self.state != READY:
            raise _not_serving()
        return self.pipeline.submit(request)

    async def drain(self, grace_s: float | None = None) -> None:
        """Leaves the registry, takes no new request, lets those here finish for `grace_s`, then ends them.

        Returns when every page is back. Idempotent.
        """
        self.state = DRAINING
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        await self._report(False)
        if not self.pipeline.quiet.is_set():
            await self._wait_for_quiet(self.settings.grace_s if grace_s is None else grace_s)
        for sequence in self.pipeline.sequences:
            self.pipeline.end(sequence, State.ABORTED, _not_serving())
        await self.pipeline.quiet.wait()  # bounded by one step

    async def _wait_for_quiet(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self.pipeline.quiet.wait()
        except TimeoutError:
            left = len(self.pipeline.sequences)
            log.warning("%s: the grace period is over, %d requests end", self.worker_id, left)

    async def stop(self) -> None:
        """Ends what is left and frees everything. Safe after a failed start. Idempotent."""
        await self.drain(0.0)
        await self._server.stop(STREAM_GRACE_S)
        await self._transfer.stop()
        await self._background.stop()
        await asyncio.to_thread(self.pipeline.handoffs.receiver.close)
        await asyncio.to_thread(self._thread.close)

    @property
    def address(self) -> str:
        """host:port of the Decode and Worker services, as others reach them."""
        return self.settings.advertise or self._server.address

    @property
    def transfer_address(self) -> str:
        """host:port of the Transfer service, as prefill workers reach it."""
        return self.settings.advertise_transfer or self._transfer.address

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=DECODE,
            incarnation=self.incarnation,
            state=self.state,
            model=self.model,
            endpoints=(Endpoint(self.address),),
            transfer=(Endpoint(self.transfer_address),),
            contract=self.contract,
            load=self._load(),
            lease_s=self.settings.registry.lease_s,
        )

    def bundle_bytes(self) -> bytes:
        return self._bundle

    def accounts(self) -> Accounts:
        """Where every page is. Cached prefixes that nobody reads do not count as held."""
        fault = ""
        try:
            self.blocks.check_integrity()
        except Internal as error:
            fault = str(error)
        here = {sequence.key: sequence for sequence in self.pipeline.sequences}
        return Accounts(
            pages_total=self.blocks.pages,
            pages_free=self.blocks.free_count,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            holdings=tuple(
                _holding(owner, len(pages), here.get(owner.removesuffix("/pin")))
                for owner, pages in self.blocks.holdings().items()
            ),
            fault=fault,
        )

    def _load(self) -> Load:
        scheduler = self.pipeline.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=sum(len(sequence.ids) for sequence in scheduler.waiting),
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=self.pipeline.tokens_per_s,
            steps=self._thread.steps,
        )

    async def _reap(self) -> None:
        """Ends what is overdue and watches the engine. Runs on a timer: it needs no traffic."""
        while True:
            await asyncio.sleep(self.settings.reap_s)
            self.pipeline.reap(time.monotonic())
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
        self.pipeline.fail_all(Internal("the decode worker failed", remedy="see its log", retryable=True))


def _holding(owner: str, pages: int, sequence: Sequence | None) -> Holding:
    waits = sequence is not None and sequence.state in HANDOFF
    kind = PIN if owner.endswith("/pin") else GRANT if waits else REQUEST
    left = sequence.deadline - time.monotonic() if sequence is not None and waits else -1.0
    return Holding(owner, kind, pages, left)


def _not_serving() -> Unavailable:
    return Unavailable(
        "this decode worker is not serving", reason="DRAINING", remedy="send it to another decode worker"
    )
