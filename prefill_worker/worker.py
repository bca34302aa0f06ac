"""The prefill worker: one event loop that owns everything, one engine thread that runs its plans.

    Prefill/Run --> run(): check, submit --> waiting --> loop: admit, plan, engine step, apply
                                                           |
                                  one task per prompt: _hand_over() drives its sender to decode's
                                  acknowledgement, then returns the pages, then answers Run

Who ends a prompt early: its caller (cancelled call), the reaper (deadline or lease over), drain, a
failed step; all through `_end`. Who returns its pages: `_hand_over` alone, after the step that
writes them and the sender that reads them are over. A prompt that still waits has none.

Cancellation is looked at between layers. A step that several prompts share stops early only
when all of them were dropped: the others keep their work, and the dropped one's pages come
back when that step ends, which chunk_tokens bounds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from functools import partial

from cache_transfer.contract import Endpoint
from cache_transfer.sender import HandoffSender, SendReport
from cache_transfer.transport import GrpcTransport
from pdserve.engine.blocks import BlockManager
from pdserve.engine.cache import SequenceSource
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import StepOutput, StepPlan
from pdserve.engine.runner import EngineThread
from pdserve.errors import Cancelled, DeadlineExceeded, Internal, PdserveError, Unavailable
from pdserve.registry.heartbeat import Heartbeat
from pdserve.registry.records import DRAINING, PREFILL, READY, STARTING, Load, Registry, WorkerRecord
from pdserve.registry.worker_service import LEASE, Accounts, Holding
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle
from prefill_worker import service
from prefill_worker.admission import Limits, PrefillRequest, cache_identity, check_request, receiver_address
from prefill_worker.handoff import Job, PrefillResult, exit_state
from prefill_worker.scheduler import Prompt, Scheduler, State
from prefill_worker.settings import PrefillSettings

log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker: start(), then run() for each prompt, then drain() and stop().

    Belongs to the event loop that calls `start`. May be made outside of one.

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
        self.contract = self.engine.contract(bundle.digest() if bundle else b"")
        self.state = STARTING
        config, spec = self.engine.config, self.engine.spec
        self.blocks = BlockManager(config.pages, config.page_size)
        self.scheduler = Scheduler(
            self.blocks,
            page_size=config.page_size,
            chunk_tokens=settings.chunk_tokens,
            max_queue=settings.max_queue,
            max_running=settings.max_running,
            lease_s=settings.lease_s,
        )
        self._limits = Limits(
            model=self.model,
            contract=self.contract,
            context_limit=min(settings.context_limit or spec.context_limit, spec.context_limit),
            pages=config.pages,
            page_size=config.page_size,
        )
        self._bundle = bundle.to_bytes() if bundle else b""
        self._registry = registry
        self._server = Server(settings.rpc, settings.host, settings.port)
        service.add_services(self._server, self)
        self._jobs: dict[Prompt, Job] = {}
        self._submitted = 0  # prompts so far
        self._rate = 0.0  # prompt tokens per second of engine time, smoothed
        self._thread: EngineThread | None = None
        self._channels: ChannelPool | None = None
        self._heartbeat: Heartbeat | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()  # the loop has something to look at
        self._quiet = asyncio.Event()  # no prompt is here
        self._quiet.set()
        self._closing = asyncio.Event()
        self._stalled = False
        self.broken = asyncio.Event()
        """Set when a background task died of a fault of ours: the process should be replaced."""

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds, serves, announces itself. Raises ConfigError (port in use) or Unavailable (registry)."""
        self._thread = EngineThread(self.engine.config.threads, name="prefill-engine")
        self._channels = ChannelPool(self.settings.rpc)
        await self._server.start(serving=False)
        self._spawn(self._loop(), "loop")
        self._spawn(self._reap(), "reaper")
        self.state = READY
        if self._registry is not None:
            self._heartbeat = Heartbeat(self._registry, self.record, self.settings.registry)
            await self._heartbeat.start()
        await self._server.set_serving(True)

    async def drain(self, grace_s: float | None = None) -> None:
        """Leaves the registry, takes no new prompt, lets those in flight finish; then ends the rest. Idempotent."""
        self.state = DRAINING
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            await heartbeat.stop()
        await self._server.set_serving(False)
        try:
            await asyncio.wait_for(self._quiet.wait(), self.settings.grace_s if grace_s is None else grace_s)
        except TimeoutError:
            log.warning("%s: %d prompts are ended after the grace period", self.worker_id, len(self._jobs))
        for job in tuple(self._jobs.values()):
            self._end(job, State.ABORTED, _draining())
        await self._quiet.wait()  # their handovers end by themselves: no step is longer than chunk_tokens

    async def stop(self) -> None:
        """Ends what is left and frees everything. Safe after a failed start."""
        await self.drain(0.0)
        self._closing.set()
        self._wake.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each reported its own error
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)
        if self._channels is not None:
            await self._channels.close()
        await self._server.stop(0.0)

    # -- what it tells ---------------------------------------------------------------------

    @property
    def address(self) -> str:
        """host:port that others reach this worker by."""
        return self.settings.advertise or self._server.address

    def record(self) -> WorkerRecord:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        load = Load(
            running=len(running),
            waiting=len(waiting),
            waiting_limit=self.settings.max_queue,
            queued_tokens=self.scheduler.queued_tokens,
            pages_total=self.blocks.pages,
            pages_held=self.blocks.held_count,
            pages_cached=self.blocks.cached_count,
            tokens_per_s=self._rate,
            steps=self._thread.steps if self._thread else 0,
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
        deadlines = {prompt.owner: prompt.deadline for prompt in self._jobs}
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

    # -- one prompt ------------------------------------------------------------------------

    async def run(self, request: PrefillRequest, deadline_s: float) -> PrefillResult:
        """Computes a prompt and hands it over; cancelling the caller stops the work.

        Raises:
            NotFound, InvalidRequest, Incompatible: see `check_request`; nothing was started.
            Exhausted: QUEUE_FULL. Unavailable: DRAINING, or decode is gone.
            DeadlineExceeded: the call's deadline, the ticket's time in the queue, or the lease.
            PdserveError: whatever the decode worker refused or failed with.
        """
        if self.state != READY:
            raise _draining()
        check_request(request, self._limits)
        job = self._submit(request, deadline_s)
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            late = time.monotonic() >= job.prompt.deadline
            state = State.EXPIRED if late else State.ABORTED
            self._end(job, state, Cancelled("the caller went away", reason="CALLER_GONE"))
            raise

    def _submit(self, request: PrefillRequest, deadline_s: float) -> Job:
        now = time.monotonic()
        self._submitted += 1
        prompt = Prompt(
            owner=f"{request.request_id}/{self._submitted}",
            ids=request.ids,
            identity=cache_identity(self.contract, request.adapter, request.tenant),
            deadline=now + deadline_s,
            # A ticket that ran out in the queue would be refused after all the work.
            queue_deadline=now + min(deadline_s, request.ticket.ttl_ms / 1000),
        )
        wait_s = self.scheduler.queued_tokens / self._rate if self._rate else 1.0
        self.scheduler.submit(prompt, retry_after_ms=max(1, round(1000 * wait_s)))
        job = Job(request, prompt, asyncio.get_running_loop().create_future(), received=now)
        self._jobs[prompt] = job
        self._quiet.clear()
        self._wake.set()
        return job

    def _end(self, job: Job, state: State, error: PdserveError) -> None:
        """Tells a prompt to end early, for the first reason given."""
        if job.prompt.state is State.QUEUED:
            self.scheduler.release(job.prompt, state)
            self._forget(job, error, None)
        elif job.ending is None and job.sender is not None and not job.result.done():
            job.ending = state, error
            self.scheduler.drop(job.prompt)
            job.sender.fail(error)

    async def _hand_over(self, job: Job, sender: HandoffSender) -> None:
        """From leaving the queue to the end, whatever the end is: the only place that returns pages."""
        state, report = State.FAILED, None
        error: PdserveError | None = Internal("the handoff ended without an error", reason="HANDOFF")
        try:
            report = await sender.run()
            state, error = State.RELEASED, None
        except PdserveError as failure:
            state, error = job.ending or (exit_state(failure), failure)
        finally:
            self.scheduler.drop(job.prompt)
            await job.still.wait()
            self.scheduler.release(job.prompt, state)
            self._forget(job, error, report)

    def _forget(self, job: Job, error: PdserveError | None, report: SendReport | None) -> None:
        """The prompt has left and its pages are back: log it, answer its caller, look at the queue again."""
        del self._jobs[job.prompt]
        if error is None:
            prompt = job.prompt
            log.info("%s: released, %d tokens in %d steps", prompt.owner, len(prompt.ids), prompt.chunks)
        else:
            log.warning("%s: %s: %s: %s", job.prompt.owner, job.prompt.state, error.reason, error)
        job.settle(error, report)
        if not self._jobs:
            self._quiet.set()
        self._wake.set()

    # -- the loop --------------------------------------------------------------------------

    async def _loop(self) -> None:
        while not self._closing.is_set():
            for prompt in self.scheduler.admit(time.monotonic()):
                self._begin(self._jobs[prompt])
            plan, prompts = self.scheduler.plan()
            if not prompts:
                await self._wake.wait()
                self._wake.clear()
                continue
            jobs = [self._jobs[prompt] for prompt in prompts]
            try:
                self._apply(plan, jobs, await self._step(plan, jobs))
            finally:
                for job in jobs:
                    job.still.set()

    def _begin(self, job: Job) -> None:
        """A prompt left the queue: opens its push, while the next step may compute it already."""
        prompt, request = job.prompt, job.request
        job.admitted = time.monotonic()
        assert self._channels is not None  # start() made it; there is no loop before
        address = receiver_address(request.ticket)
        job.sender = HandoffSender(
            GrpcTransport(self._channels.get(address), address),
            request.ticket,
            request.identity,
            self.contract,
            SequenceSource(self.engine.cache, prompt.pages, 0, len(prompt.ids)),
            logits_only=request.logits_only,
            deadline_s=max(0.0, prompt.deadline - job.admitted),
        )
        job.announce(range(self.engine.spec.layers), 0, prompt.cached)
        self._spawn(self._hand_over(job, job.sender), f"handover {prompt.owner}")

    async def _step(self, plan: StepPlan, jobs: Sequence[Job]) -> StepOutput | PdserveError:
        """Runs one plan in the engine's thread. Its error ends the prompts in it, not the worker."""
        now = time.monotonic()
        for job in jobs:
            job.still.clear()
            job.computing = job.computing or now
        ranges = [(job, c.start, c.start + len(c.ids)) for job, c in zip(jobs, plan.chunks, strict=True)]

        def on_layer(layer: int) -> None:
            for job, start, end in ranges:
                job.announce((layer,), start, end)

        def cancelled() -> bool:
            return all(job.prompt.dropped for job in jobs)

        assert self._thread is not None
        try:
            step = partial(self.engine.step, plan, on_layer=on_layer, cancelled=cancelled)
            output = await self._thread.run(step)
        except PdserveError as error:
            return error
        tokens = sum(len(chunk.ids) for chunk in plan.chunks)
        rate = tokens / max(time.monotonic() - now, 1e-6)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        return output

    def _apply(self, plan: StepPlan, jobs: Sequence[Job], output: StepOutput | PdserveError) -> None:
        """Books a step: logits of complete prompts go to their senders, prompts of a failed step end."""
        if isinstance(output, PdserveError):
            for job in jobs:
                self._end(job, State.FAILED, output)
            return
        for prompt in self.scheduler.apply(plan, [job.prompt for job in jobs]):
            job = self._jobs[prompt]
            try:
                job.commit(output.logits[prompt.owner])
            except Internal as error:
                self._end(job, State.FAILED, error)

    async def _reap(self) -> None:
        """Ends what is overdue and watches the engine. Runs on a timer: it needs no traffic."""
        while not self._closing.is_set():
            try:
                await asyncio.wait_for(self._closing.wait(), self.settings.reap_s)
            except TimeoutError:
                for prompt in self.scheduler.overdue(time.monotonic()):
                    self._end(self._jobs[prompt], State.EXPIRED, _overdue(prompt))
                await self._watch()

    async def _watch(self) -> None:
        """Health follows the engine: a step that does not end makes this worker not serving."""
        assert self._thread is not None
        stalled = self._thread.busy_s > self.settings.stall_s
        if stalled != self._stalled:
            self._stalled = stalled
            log.error("%s: the engine %s", self.worker_id, "does not answer" if stalled else "answers again")
            await self._server.set_serving(self.state == READY and not stalled)

    # -- background tasks ------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task that dies of anything unexpected must not leave a worker that only looks alive."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.critical("%s: %s died", self.worker_id, task.get_name(), exc_info=error)
        self.state = DRAINING
        self.broken.set()
        self._spawn(self._server.set_serving(False), "health")
        for job in tuple(self._jobs.values()):
            self._end(job, State.FAILED, Internal("the prefill worker failed", remedy="see its log", retryable=True))


def _draining() -> Unavailable:
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
        "the handoff did not end within its lease",
        reason="LEASE_ENDED",
        remedy="check that the decode worker has free pages, or raise lease_s",
        retryable=True,
    )
