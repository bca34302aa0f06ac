"""The prefill worker: its server and what it tells of itself. Its life is in pdserve/worker/pool_worker.py.

One event loop owns server, channels, scheduler and page books; one engine thread runs steps. What
happens to a prompt is in pipeline.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from cache_transfer.allocator import keep_freed_frames
from cache_transfer.contract import Endpoint
from pdserve.engine.adapter_files import load_adapter
from pdserve.engine.blocks import BlockManager
from pdserve.engine.checks import check_tokenizer
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.native.build import kernels_folder
from pdserve.engine.runner import EngineThread
from pdserve.errors import Cancelled
from pdserve.registry.records import PREFILL, Load, Registry
from pdserve.tokenizer import Bundle
from pdserve.worker.accounts import LEASE, Stake
from pdserve.worker.pool_worker import PoolWorker
from pdserve.worker.service import KernelReport
from pdserve.worker.trace import TracedRun
from prefill_worker import service
from prefill_worker.admission import Limits, PrefillRequest, check_request
from prefill_worker.handoff import PrefillResult
from prefill_worker.metrics import PrefillCollector
from prefill_worker.peers import Peers
from prefill_worker.pipeline import Pipeline
from prefill_worker.scheduler import State
from prefill_worker.settings import PrefillSettings
from prefill_worker.tracer import OWNER as TRACER
from prefill_worker.tracer import Tracer


class PrefillWorker(PoolWorker):
    """One prefill worker: start(), then run() for each prompt, then drain() and stop().

    Args:
        model: a loaded model, or an engine that nobody else steps meanwhile.
        bundle: the tokenizer bundle; None: the model has none.
        settings: checked here (raises ConfigError).
        registry: where to announce itself; None: nowhere. The caller closes it, after stop().

    Raises ConfigError (SIZE_MISMATCH) for a tokenizer of another model.
    """

    pipeline: Pipeline

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
        config, spec = self.engine.config, self.engine.spec
        check_tokenizer(spec, bundle.vocab_size if bundle else 0)
        self.blocks = BlockManager(config.pages, config.page_size)
        keep_freed_frames()  # before the engine's thread takes a heap of its own
        self._thread = EngineThread(config.threads, name="prefill-engine")
        super().__init__(
            PREFILL,
            settings.name or self.engine.name,
            replace(
                self.engine.contract(bundle.digest() if bundle else b"", settings.context_limit),
                allow_lossy=settings.allow_lossy,
            ),
            bundle.to_bytes() if bundle else b"",
            settings,
            registry,
            self._thread,
            self.blocks,
            self.engine.adapters,
            self._thread.alike(partial(load_adapter, base=self.engine.base)),
        )
        self._limits = Limits(
            model=self.model,
            contract=self.contract,
            context_limit=min(settings.context_limit or spec.context_limit, spec.context_limit),
            pages=config.pages,
            page_size=config.page_size,
            adapters=self.adapters,
        )
        self._peers = Peers(settings.rpc, shares_memory=settings.shared_memory != "off")
        self.pipeline = Pipeline(
            self.engine, self.contract, settings, self.blocks, self._thread, self._peers, self._background, self.traces
        )
        self._tracer = Tracer(
            self.engine,
            self._thread,
            self.blocks,
            allowed=settings.allow_trace,
            limit=self._limits.context_limit,
            step_tokens=settings.chunk_tokens,
            lease_s=settings.lease_s,
            freed=self.pipeline.pages_freed,
        )
        service.add_services(self._server, self)

    async def run(self, request: PrefillRequest, deadline_s: float) -> PrefillResult:
        """Computes a prompt and hands it over; cancelling the caller stops the work.

        Raises:
            NotFound, InvalidRequest, Incompatible: see `check_request`; nothing was started.
            Exhausted: QUEUE_FULL. Unavailable: DRAINING, or decode is gone.
            DeadlineExceeded: the call's deadline, the ticket's time in the queue, or the lease.
            PdserveError: whatever the decode worker refused or failed with.
        """
        with self.pipeline.counted.refusals.counting():
            self.check_serving()
            check_request(request, self._limits)
            job = self.pipeline.submit(request, deadline_s)
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            late = time.monotonic() >= job.prompt.deadline
            state = State.EXPIRED if late else State.ABORTED
            self.pipeline.end(job, state, Cancelled("the caller went away", reason="CALLER_GONE"))
            raise

    async def trace(self, ids: tuple[int, ...], chunk_tokens: int, columns: int) -> TracedRun:
        """See `Tracer.run`. Raises Unavailable besides, when the worker does not serve."""
        self.check_serving()
        return await self._tracer.run(ids, chunk_tokens, columns)

    async def _listen(self) -> None:
        """The one server is all there is; the model is the engine's alone by now."""
        await asyncio.to_thread(self._thread.alike(self.engine.prepare))

    async def _close(self, wait: bool) -> None:
        await self._peers.close()

    def kernels(self) -> KernelReport:
        counters = self.engine.kernels
        return KernelReport(counters.state, counters.why, kernels_folder())

    def _collector(self) -> PrefillCollector:
        return PrefillCollector(self)

    def _transfer_endpoints(self) -> tuple[Endpoint, ...]:
        return ()

    def _load(self) -> Load:
        scheduler = self.pipeline.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=scheduler.queued_tokens,
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=scheduler.cost.tokens_per_s(self.settings.chunk_tokens),
            steps=self._thread.steps,
            prefill_tokens_per_s=scheduler.cost.tokens_per_s(self.settings.chunk_tokens),
            queued_prefill_tokens=scheduler.queued_tokens,
            fixed_step_ms=1000 * scheduler.cost.fixed_s,
            predicted_wait_s=self.pipeline.predicted_wait_s(self.settings.chunk_tokens),
            transfer_bytes_per_s=self.pipeline.sending.bytes_per_s,
            prefill_token_us=1e6 * scheduler.cost.full_token_s(self.settings.chunk_tokens),
            prefill_pair_ns=1e9 * scheduler.cost.pair_s,
            step_ms=1000 * self.pipeline.step_s,
            chunk_tokens=scheduler.full_chunk,
        )

    def _stakes(self) -> tuple[Stake, ...]:
        """A prompt that waits in the queue holds nothing."""
        leases = tuple(Stake(p.owner, LEASE, p.pages, p.deadline) for p in self.pipeline.jobs if p.pages)
        traced = self._tracer.pages
        return (*leases, Stake(TRACER, LEASE, traced, self._tracer.deadline)) if traced else leases
