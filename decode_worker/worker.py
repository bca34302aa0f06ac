"""The decode worker: its two servers and what it tells of itself. Its life is in pdserve/worker/pool_worker.py.

One event loop owns servers, scheduler, tickets and page books; one engine thread runs steps and
samples. What happens to a request is in pipeline.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from cache_transfer.contract import Endpoint, Ticket
from cache_transfer.service import TransferService
from cache_transfer.service import register as register_transfer
from cache_transfer.shared import endpoints_of
from decode_worker import service
from decode_worker.admission import Admission, DecodeRequest, Limits
from decode_worker.metrics import DecodeCollector
from decode_worker.pipeline import Pipeline
from decode_worker.sequence import Sequence, State
from decode_worker.settings import DecodeSettings
from pdserve.engine.adapter_files import load_adapter
from pdserve.engine.blocks import BlockManager
from pdserve.engine.checks import check_tokenizer
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.native.build import kernels_folder
from pdserve.engine.runner import EngineThread
from pdserve.registry.records import CHOICES, DECODE, GRAMMAR, SPECIAL_TOKENS, SPLIT, Load, Registry
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle, Tokenizer
from pdserve.worker.accounts import GRANT, PIN, PREEMPTED, REQUEST, TICKET, Accounts, Stake
from pdserve.worker.pool_worker import PoolWorker
from pdserve.worker.service import KernelReport


class DecodeWorker(PoolWorker):
    """One decode worker: start(), then submit() for each request, then drain() and stop().

    Args:
        model: a loaded model, or an engine that nobody else steps.
        bundle: the tokenizer bundle; None: the model has none, and only ids are streamed.
        settings: checked here (raises ConfigError).
        registry: where to announce itself; None: nowhere. The caller closes it, after stop().

    Raises ConfigError (SIZE_MISMATCH) for a tokenizer of another model.
    """

    pipeline: Pipeline
    takes_prompts = True
    capabilities = frozenset({CHOICES, GRAMMAR, SPECIAL_TOKENS, SPLIT})

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
        config, spec = self.engine.config, self.engine.spec
        check_tokenizer(spec, bundle.vocab_size if bundle else 0)
        self.blocks = BlockManager(config.pages, config.page_size)
        self._thread = EngineThread(config.threads, name="decode-engine")
        super().__init__(
            DECODE,
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
        limits = Limits(
            model=self.model,
            contract=self.contract,
            context_limit=min(settings.context_limit or spec.context_limit, spec.context_limit),
            pages=config.pages,
            page_size=config.page_size,
            adapters=self.adapters,
            eos_ids=tuple(sorted({*spec.eos_ids, *(bundle.eos_ids if bundle else ())})),
            has_text=bundle is not None,
        )
        tokenizer = Tokenizer(bundle) if bundle else None
        self.pipeline = Pipeline(
            self.engine,
            limits,
            settings,
            self.blocks,
            self._thread,
            self._background,
            tokenizer,
            self.incarnation,
            self.traces,
        )
        self._transfer = Server(settings.rpc, settings.host, settings.transfer_port)
        self._transfer.add(register_transfer, TransferService(self.pipeline.handoffs.receiver, self.worker_id))
        service.add_services(self._server, self)

    def submit(self, request: DecodeRequest, deadline_s: float = math.inf) -> tuple[Sequence, Admission, Ticket | None]:
        """See `Pipeline.submit`; raises Unavailable besides, when the worker does not serve."""
        with self.pipeline.counted.refusals.counting():
            self.check_serving()
            return self.pipeline.submit(request, deadline_s)

    @property
    def transfer_address(self) -> str:
        """host:port of the Transfer service, as prefill workers reach it."""
        return self.settings.advertise_transfer or self._transfer.address

    async def _listen(self) -> None:
        await asyncio.to_thread(self._thread.alike(self.engine.prepare))  # now that nobody else holds the model
        await self._transfer.start()
        self.pipeline.handoffs.endpoints = self._transfer_endpoints()

    async def _close(self, wait: bool) -> None:
        await self._transfer.stop()
        if wait:
            await asyncio.to_thread(self.pipeline.handoffs.receiver.close)

    def kernels(self) -> KernelReport:
        counters = self.engine.kernels
        return KernelReport(counters.state, counters.why, kernels_folder())

    def _collector(self) -> DecodeCollector:
        return DecodeCollector(self)

    def _transfer_endpoints(self) -> tuple[Endpoint, ...]:
        return endpoints_of(self.transfer_address, self.settings.shared_memory)

    def _load(self) -> Load:
        scheduler = self.pipeline.scheduler
        prompts, unfinished, beside = scheduler.prompts, scheduler.unfinished, scheduler.beside
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=sum(len(sequence.ids) for sequence in scheduler.waiting if not sequence.here),
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=self.pipeline.tokens_per_s,
            steps=self._thread.steps,
            prefill_tokens_per_s=prompts.tokens_per_s(),
            shared_prefill_tokens_per_s=prompts.shared_tokens_per_s(beside),
            queued_prefill_tokens=sum(s.remaining for s in unfinished) + scheduler.expected_tokens,
            predicted_wait_s=prompts.wait_s(unfinished, beside),
            fixed_step_ms=1000 * prompts.told.fixed_s,
            decode_step_ms=1000 * prompts.told.predict(beside) if beside else 0.0,
            prefill_token_us=1e6 * prompts.told.full_token_s(self.settings.chunk_tokens) if prompts.computed else 0.0,
            prefill_pair_ns=1e9 * prompts.told.pair_s if prompts.computed else 0.0,
            step_ms=1000 * self.pipeline.step_s,
            batch_limit=self.settings.max_batch,
            chunk_tokens=self.settings.chunk_tokens,
        )

    def accounts(self) -> Accounts:
        scheduler = self.pipeline.scheduler
        return replace(
            super().accounts(),
            recomputed_tokens=scheduler.recomputed_tokens,
            handoffs=self.pipeline.handoffs.verified_count,
            **asdict(scheduler.counters),
        )

    def _stakes(self) -> tuple[Stake, ...]:
        tail = self.pipeline.scheduler.running_tail
        running = () if tail is None else (Stake(tail.owner, REQUEST, tail.chunk.pages, tail.ends_at),)
        return (*running, *(stake for sequence in self.pipeline.sequences for stake in _stakes_of(sequence)))


def _stakes_of(sequence: Sequence) -> Iterator[Stake]:
    """While the cache is on its way its deadline counts, afterwards the request's."""
    own = (*sequence.pages[len(sequence.held) :], *sequence.leaving)
    if sequence.awaits_handoff:
        kind, deadline = GRANT if sequence.pages else TICKET, sequence.deadline
    else:
        kind, deadline = PREEMPTED if sequence.state is State.PREEMPTED else REQUEST, sequence.ends_at
    yield Stake(sequence.key, kind, own, deadline)
    if sequence.held:
        yield Stake(sequence.pin, PIN, sequence.held, deadline)
