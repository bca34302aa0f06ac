"""The decode worker: one event loop that owns everything, one engine thread that runs its plans.

    Decode/Generate --> submit(): check, pin, ticket --> waiting
    Transfer/Push   --> Receiver --> Handoffs: grant, verified --> running
                                                                     |
                        loop: plan, engine step and sampler, apply --+--> the sequence's stream --> Generate

Who ends a sequence early: its caller (closed stream), the tend task (deadline over, reader gone),
drain, a failed step; all through `end`. Its pages go back in `Scheduler.leave`, once neither
a step nor a receiver's thread writes them any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from cache_transfer.contract import Endpoint, Ticket, WorkerContract, check_compatible
from cache_transfer.service import TransferService
from cache_transfer.service import register as register_transfer
from decode_worker.admission import Admission, DecodeRequest, Limits, cache_identity, check_request
from decode_worker.generation import Generation
from decode_worker.handoffs import Handoffs
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import EXITS, HANDOFF, Outcome, Sequence, State
from decode_worker.service import DecodeService
from decode_worker.service import register as register_decode
from decode_worker.settings import DecodeSettings
from decode_worker.step import DecodePlan, step_and_sample
from decode_worker.stream import EventStream
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.runner import EngineThread
from pdserve.errors import DeadlineExceeded, Internal, PdserveError, Unavailable
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DECODE, DRAINING, READY, STARTING, Load, Registry, WorkerRecord
from pdserve.registry.worker_service import GRANT, PIN, REQUEST, Accounts, Holding, WorkerService
from pdserve.registry.worker_service import register as register_worker
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle, Tokenizer

log = logging.getLogger(__name__)


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
        self.contract = self.engine.contract(bundle.digest() if bundle else b"")
        self.limits = _limits(self.engine, self.model, self.contract, bundle, settings)
        self.blocks = BlockManager(self.limits.pages, self.limits.page_size)
        self.scheduler = Scheduler(
            self.blocks, self.limits.page_size, settings.max_queue, settings.max_batch, on_exit=self._left
        )
        self._tokenizer = None if bundle is None else Tokenizer(bundle)
        self._bundle = b"" if bundle is None else bundle.to_bytes()
        self._wake = asyncio.Event()  # the loop may have something to plan
        self._idle = asyncio.Event()  # no sequence is here
        self._idle.set()
        self.handoffs = Handoffs(
            self.incarnation, self.contract, self.scheduler, self.engine.cache, settings, self._wake.set
        )
        self._server = Server(settings.rpc, settings.host, settings.port)
        self._transfer = Server(settings.rpc, settings.host, settings.transfer_port)
        self._server.add(register_decode, DecodeService(self))
        self._server.add(register_worker, WorkerService(self))
        self._transfer.add(register_transfer, TransferService(self.handoffs.receiver))
        self._thread: EngineThread | None = None
        self._heartbeat = None if registry is None else Heartbeat(registry, self.record, settings.registry)
        self._state = STARTING
        self._count = 0  # requests ever submitted
        self._rate = 0.0  # output tokens per second of step time, smoothed
        self._serving = False  # what health says
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port of the Decode and Worker services, as others reach them."""
        return self.settings.advertise or self._server.address

    @property
    def transfer_address(self) -> str:
        return self.settings.advertise_transfer or self._transfer.address

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> str:
        """Binds both listeners, registers, serves. Returns the address.

        Raises:
            ConfigError: a port is in use, or an address is not allowed.
            Unavailable: the registry cannot be reached.
        """
        self._thread = EngineThread(self.engine.config.threads)
        try:
            await self._transfer.start()
            await self._server.start(serving=False)
            self.handoffs.endpoints = (Endpoint(self.transfer_address),)
            self._spawn(self._decode(self._thread))
            self._spawn(self._tend(self._thread))
            self._state = READY
            if self._heartbeat is not None:
                await self._heartbeat.start()
            await self._report(True)
        except PdserveError:
            await self.stop()
            raise
        return self.address

    async def drain(self, grace_s: float | None = None) -> None:
        """Leaves the registry, refuses new requests, lets those in flight end; then they get Unavailable."""
        if self._state == DRAINING:
            return
        self._state = DRAINING
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        await self._report(False)
        try:
            async with asyncio.timeout(self.settings.grace_s if grace_s is None else grace_s):
                await self._idle.wait()
        except TimeoutError:
            for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
                self.end(sequence, State.ABORTED, _going())
            await self._idle.wait()

    async def stop(self) -> None:
        """Ends everything; returns when no thread, task or port of this worker is left. Idempotent."""
        await self.drain(0)
        await self._server.stop(1.0)  # streams still deliver their last event
        await self._transfer.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.handoffs.receiver.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: DecodeRequest) -> tuple[Sequence, Admission, Ticket | None]:
        """Checks a request and lets it wait for its cache. No ticket: replaying its output already ended it.

        Raises what `check_request` raises, Exhausted (queue full), Unavailable (draining).
        """
        if self._state != READY:
            raise _going() if self._state == DRAINING else Unavailable("the worker is starting", reason="STARTING")
        admission = check_request(request, self.limits)
        self._count += 1
        generation = Generation(
            request.prompt_ids, request.sampling, admission.limit, self.limits.eos_ids, self._tokenizer
        )
        sequence = Sequence(
            key=f"{request.request_id}#{self._count}",
            request=request,
            generation=generation,
            stream=EventStream(self.settings.max_unread_tokens, self._wake.set),
            cache_identity=cache_identity(self.contract, request.adapter, request.tenant),
            cache_tokens=admission.cache_tokens,
        )
        for batch in generation.replay(request.output_ids):
            if batch.first_index >= request.forwarded_tokens:
                sequence.stream.put(batch)
        if generation.finish is not None:
            sequence.move(State.DONE)
            sequence.stream.put(generation.finish)
            return sequence, admission, None
        self.scheduler.submit(sequence)
        self._idle.clear()
        generation.cached_prompt_tokens = min(sequence.cached, len(request.prompt_ids))
        return sequence, admission, self.handoffs.open(sequence)

    async def retry(self, sequence: Sequence, prefill_contract: WorkerContract) -> None:
        """Puts the next attempt's ticket on the stream, unless the cache is complete already.

        Raises Incompatible naming the field, Refused when the request is over.
        """
        check_compatible(prefill_contract, self.contract)
        ticket = await self.handoffs.retry(sequence)
        if ticket is not None:
            sequence.stream.put(ticket)

    def end(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        """Ends a sequence early, once nothing writes its pages. The first reason counts; idempotent."""
        if sequence.state in EXITS or sequence.ending is not None:
            return
        sequence.ending = (state, error)
        if sequence.state in HANDOFF:
            self.handoffs.forget(sequence)
            self._spawn(self._drain_and_leave(sequence, state, error))
        elif not sequence.stepping:  # else `apply` sees to it
            self.scheduler.leave(sequence, state, error)

    async def _drain_and_leave(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        await self.handoffs.close(sequence)
        self.scheduler.leave(sequence, state, error)

    def _left(self, sequence: Sequence, outcome: Outcome) -> None:
        self.handoffs.forget(sequence)
        log.info("%s: %s%s", outcome.key, outcome.state, f" ({outcome.error})" if outcome.error else "")
        if self.scheduler.idle:
            self._idle.set()
        self._wake.set()

    # -- the loop ------------------------------------------------------------------------------

    async def _decode(self, engine: EngineThread) -> None:
        while True:
            self._wake.clear()
            plan = self.scheduler.plan()
            if not plan.samplers:
                await self._wake.wait()
                continue
            await self._step(engine, plan)

    async def _step(self, engine: EngineThread, plan: DecodePlan) -> None:
        began = time.monotonic()
        try:
            output = await engine.run(step_and_sample, self.engine, plan)
        except PdserveError as error:
            log.error("a step failed: %s", error)
            self.scheduler.abandon(plan, error)
        except Exception:
            log.exception("a step failed")
            self.scheduler.abandon(plan, Internal("the engine failed", remedy="see the worker's log"))
        else:
            given = self.scheduler.apply(plan, output)
            self._rate += 0.1 * (given / max(time.monotonic() - began, 1e-9) - self._rate)

    async def _tend(self, engine: EngineThread) -> None:
        """Ends what took too long, and watches the engine; runs by the clock, whatever the traffic."""
        while True:
            await asyncio.sleep(self.settings.reap_s)
            self.reap(time.monotonic())
            stalled = engine.busy_s > self.settings.stall_s
            if stalled and self._serving:
                log.warning("an engine step has been running for %.0f s: not serving", engine.busy_s)
            await self._report(self._state == READY and not stalled)

    def reap(self, now: float) -> None:
        for sequence in [s for s in self.scheduler.waiting if now >= s.deadline]:
            self.end(sequence, State.EXPIRED, _expired(sequence))
        for sequence in list(self.scheduler.running):
            since = sequence.stream.full_since
            if since is not None and now >= since + self.settings.reader_s:
                error = DeadlineExceeded(
                    f"the reader left {sequence.stream.unread} tokens unread for {self.settings.reader_s:g} s",
                    reason="SLOW_READER",
                    remedy="read the stream faster",
                )
                self.end(sequence, State.EXPIRED, error)

    # -- what it tells about itself ------------------------------------------------------------

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            role=DECODE,
            incarnation=self.incarnation,
            state=self._state,
            model=self.model,
            endpoints=(Endpoint(self.address),),
            transfer=(Endpoint(self.transfer_address),),
            contract=self.contract,
            load=self.load(),
            lease_s=self.settings.registry.lease_s,
        )

    def load(self) -> Load:
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=sum(len(s.ids) for s in self.scheduler.waiting),
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=self._rate,
            steps=0 if self._thread is None else self._thread.steps,
        )

    def bundle_bytes(self) -> bytes:
        return self._bundle

    def accounts(self) -> Accounts:
        fault = ""
        try:
            self.blocks.check_integrity()
        except Internal as error:
            fault = str(error)
        held = self.blocks.holdings()
        here = {s.key: s for s in (*self.scheduler.waiting, *self.scheduler.running)}
        return Accounts(
            pages_total=self.blocks.pages,
            pages_free=self.blocks.free_count,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            holdings=tuple(
                _holding(owner, len(pages), here.get(owner.removesuffix("/pin"))) for owner, pages in held.items()
            ),
            fault=fault,
        )

    async def _report(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            await self._server.set_serving(serving)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the worker failed", exc_info=error)
            self._give_up()

    def _give_up(self) -> None:
        """An invariant of ours does not hold: nothing new, and nothing goes on as if all were well."""
        self._state = DRAINING
        self._spawn(self._report(False))
        for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
            sequence.stepping = False
            self.end(sequence, State.FAILED, Internal("the worker failed", remedy="see the worker's log"))


def _limits(
    engine: Engine, model: str, contract: WorkerContract, bundle: Bundle | None, settings: DecodeSettings
) -> Limits:
    limit = engine.spec.context_limit
    eos = set(engine.spec.eos_ids) | set(bundle.eos_ids if bundle else ())
    return Limits(
        model=model,
        contract=contract,
        context_limit=min(settings.context_limit or limit, limit),
        pages=engine.config.pages,
        page_size=engine.config.page_size,
        eos_ids=tuple(sorted(eos)),
        has_text=bundle is not None,
    )


def _holding(owner: str, pages: int, sequence: Sequence | None) -> Holding:
    waits = sequence is not None and sequence.state in HANDOFF
    kind = PIN if owner.endswith("/pin") else GRANT if waits else REQUEST
    left = sequence.deadline - time.monotonic() if sequence is not None and waits else -1.0
    return Holding(owner, kind, pages, left)


def _going() -> Unavailable:
    return Unavailable("the worker is shutting down", reason="DRAINING", remedy="send it to another decode worker")


def _expired(sequence: Sequence) -> PdserveError:
    if sequence.state is State.WAITING:
        cause = f"; the last attempt failed: {sequence.attempt_error}" if sequence.attempt_error else ""
        return DeadlineExceeded(f"no cache came before the ticket expired{cause}", reason="TICKET_EXPIRED")
    return DeadlineExceeded("the cache did not arrive in time", reason="RECEIVE_TIMEOUT")
