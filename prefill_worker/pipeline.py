"""Prompts through the engine and over the wire: one loop that steps, one task per handoff.

    submit --> waiting --> loop: admit, plan, engine step, apply, commit
                             |
               _hand_over(): drives the prompt's sender to decode's acknowledgement,
                             returns the pages, answers the caller

Who ends a prompt early: its caller, the reaper, drain, a failed or stalled step; all through `end`.
Its caller hears of a failure at once, even while a step still runs or hangs. Who returns its
pages: `_hand_over` alone, after the step that writes them and the sender that reads them are
over. A prompt that still waits has none.

Cancellation is looked at between layers. A step that several prompts share stops early only
when all of them were dropped: the others keep their work, and the dropped one's pages come
back when that step ends, which chunk_tokens bounds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from cache_transfer.contract import WorkerContract, cache_identity
from cache_transfer.sender import HandoffSender, SendReport
from pdserve.engine.blocks import BlockManager
from pdserve.engine.checks import check_written
from pdserve.engine.engine import Engine
from pdserve.engine.handover import SequenceSource
from pdserve.engine.plan import StepOutput, StepPlan
from pdserve.engine.prefix import Prefix
from pdserve.engine.runner import EngineThread
from pdserve.errors import Internal, PdserveError, Unavailable
from pdserve.rpc.background import Background
from pdserve.telemetry.logs import about, quoteless
from pdserve.telemetry.traces import OFF, Traces
from prefill_worker.admission import PrefillRequest, receiver_address
from prefill_worker.announce import Announcements
from prefill_worker.handoff import Job, exit_state
from prefill_worker.metrics import Counted
from prefill_worker.overdue import overdue
from prefill_worker.peers import Peers
from prefill_worker.scheduler import Prompt, Scheduler, State
from prefill_worker.sending import SendRate
from prefill_worker.settings import PrefillSettings
from prefill_worker.tracing import PromptTrace

log = logging.getLogger(__name__)


class Pipeline:
    """All prompts of one worker. Event loop only, except for what the engine's thread calls back.

    Args:
        thread: the engine's.
        peers: connections to decode workers.
        background: runs the handoffs; the owner runs `loop` in it too.
    """

    def __init__(
        self,
        engine: Engine,
        contract: WorkerContract,
        settings: PrefillSettings,
        blocks: BlockManager,
        thread: EngineThread,
        peers: Peers,
        background: Background,
        traces: Traces = OFF,
    ) -> None:
        self._traces = traces
        self.scheduler = Scheduler(
            blocks,
            page_size=blocks.page_size,
            chunk_tokens=settings.chunk_tokens,
            batch_tokens=min(settings.batch_tokens, settings.chunk_tokens),
            step_s=settings.step_ms / 1000,
            max_queue=settings.max_queue,
            max_running=settings.max_running,
            lease_s=settings.lease_s,
        )
        self.jobs: dict[Prompt, Job] = {}  # every prompt that waits or holds pages
        self.sending = SendRate()
        self.counted = Counted()
        self.step_s = 0.0  # the running step's, as expected; 0: none runs
        self.quiet = asyncio.Event()  # no prompt is here
        self.quiet.set()
        self._engine = engine
        self._contract = contract
        self._thread = thread
        self._peers = peers
        self._background = background
        self._first_token_s = settings.first_token_s
        self._reap_margin_s = 4 * settings.reap_s
        self._submitted = 0  # prompts so far
        self._wake = asyncio.Event()  # the loop has something to look at
        self._step_ends = 0.0  # when the running step is expected to end; 0: none runs

    def submit(self, request: PrefillRequest, deadline_s: float) -> Job:
        """Queues a checked request. Raises Exhausted (QUEUE_FULL) or what `Peers.take` raises."""
        now = time.monotonic()
        self._submitted += 1
        prompt = Prompt(
            owner=f"{request.request_id}/{self._submitted}",
            ids=request.ids,
            prefix=Prefix(
                cache_identity(self._contract, request.adapter, request.tenant),
                request.ids,
                self._contract.page_size,
            ),
            deadline=now + deadline_s,
            # A ticket that ran out in the queue would be refused after all the work.
            queue_deadline=now + min(deadline_s, request.ticket.ttl_ms / 1000),
            tenant=request.tenant,
            adapter=request.adapter,
            wanted_by=now + (self._first_token_s or math.inf),
        )
        wait_s = self.predicted_wait_s(len(prompt.ids)) if self.scheduler.cost.known else 1.0
        self.scheduler.submit(prompt, retry_after_ms=max(1, round(1000 * wait_s)))
        try:
            address = receiver_address(request.ticket)
            transport = self._peers.take(address)
        except PdserveError:
            self.scheduler.release(prompt, State.REFUSED)
            raise
        trace = PromptTrace(self._traces, request, now)
        job = Job(request, prompt, address, transport, asyncio.get_running_loop().create_future(), now, trace)
        self.jobs[prompt] = job
        self.quiet.clear()
        self._wake.set()
        return job

    def end(self, job: Job, state: State, error: PdserveError) -> None:
        """Tells a prompt to end early, for the first reason given."""
        if job.prompt.state is State.QUEUED:
            self.scheduler.release(job.prompt, state)
            self._forget(job, error, None)
        elif job.ending is None and job.sender is not None and not job.result.done():
            job.ending = state, error
            self.scheduler.drop(job.prompt)
            job.sender.fail(error)

    def end_all(self, error: PdserveError) -> None:
        """Tells every prompt to end."""
        state = State.ABORTED if isinstance(error, Unavailable) else State.FAILED
        for job in tuple(self.jobs.values()):
            self.end(job, state, error)

    def reap(self, now: float) -> None:
        """Ends what took too long. `now` in monotonic seconds."""
        for prompt in self.scheduler.overdue(now):
            error = overdue(prompt)
            self.counted.reaped.add(error.reason)
            self.end(self.jobs[prompt], State.EXPIRED, error)

    def pages_freed(self) -> None:
        """Pages that no prompt held are back: those that wait may fit now."""
        self._wake.set()

    @property
    def count(self) -> int:
        return len(self.jobs)

    @property
    def adapters_in_use(self) -> tuple[bytes | None, ...]:
        return tuple(job.request.adapter for job in self.jobs.values())

    def predicted_wait_s(self, tokens: int) -> float:
        """Seconds before a prompt of so many tokens that came now would begin; 0 while no step has run."""
        running = max(0.0, self._step_ends - time.monotonic()) if self._step_ends else 0.0
        return running + self.scheduler.wait_s(tokens)

    async def _hand_over(self, job: Job, sender: HandoffSender) -> None:
        """From leaving the queue to the end, whatever the end is: the only place that returns pages."""
        state, report = State.FAILED, None
        error: PdserveError | None = Internal("the handoff ended without an error", reason="HANDOFF")
        job.trace.push(job.admitted)
        try:
            report = await sender.run()
            self.sending.observe(report)
            self.counted.handed_over(report.payload_bytes + job.logits_bytes, report.ack_at - report.granted_at)
            state, error = State.RELEASED, None
        except PdserveError as failure:
            state, error = job.ending or (exit_state(failure), failure)
            self.counted.transfers.add(error.reason)
        finally:
            self.scheduler.drop(job.prompt)
            if report is None:
                job.settle(error, None)
            await job.still.wait()
            self.scheduler.release(job.prompt, state)
            self._forget(job, error, report)

    def _forget(self, job: Job, error: PdserveError | None, report: SendReport | None) -> None:
        """The prompt has left and its pages are back: log it, answer its caller, look at the queue again."""
        del self.jobs[job.prompt]
        self.counted.ended.add(job.prompt.state)
        self._background.spawn(self._peers.give_back(job.address), "connections")
        job.trace.end(job, error, report)
        prompt, extra = job.prompt, about(job.trace.scope)
        if error is None:
            log.info("%s: released, %d tokens in %d steps", prompt.owner, len(prompt.ids), prompt.chunks, extra=extra)
        else:
            log.warning("%s: %s: %s: %s", prompt.owner, prompt.state, error.reason, quoteless(error), extra=extra)
        job.settle(error, report)
        if not self.jobs:
            self.quiet.set()
        self._wake.set()

    # -- the loop --------------------------------------------------------------------------

    async def loop(self) -> None:
        """Admit, plan, run, apply, until cancelled."""
        while True:
            for prompt in self.scheduler.admit(time.monotonic()):
                self._begin(self.jobs[prompt])
            plan, prompts = self.scheduler.plan()
            if not prompts:
                await self._wake.wait()
                self._wake.clear()
                continue
            jobs = [self.jobs[prompt] for prompt in prompts]
            try:
                self._apply(plan, jobs, await self._step(plan, jobs))
            finally:
                for job in jobs:
                    job.still.set()

    def _begin(self, job: Job) -> None:
        """A prompt left the queue: opens its push, while the next step may compute it already."""
        prompt, request = job.prompt, job.request
        job.admitted = time.monotonic()
        self.counted.begun(prompt, job.admitted - job.received)
        job.sender = HandoffSender(
            job.transport,
            request.ticket,
            request.identity,
            self._contract,
            SequenceSource(self._engine.cache, prompt.pages, 0, len(prompt.ids)),
            logits_only=request.logits_only,
            # The reaper speaks first: it says whose time is over. This is the backstop.
            deadline_s=max(0.0, prompt.deadline - job.admitted) + self._reap_margin_s,
        )
        job.announce(range(self._engine.spec.layers), 0, prompt.cached)
        self._background.spawn(self._hand_over(job, job.sender), f"handover {prompt.owner}")

    async def _step(self, plan: StepPlan, jobs: Sequence[Job]) -> StepOutput | PdserveError:
        """Runs one plan in the engine's thread. Its error ends the prompts in it, not the worker."""
        now = time.monotonic()
        for job in jobs:
            job.still.clear()
            job.computing = job.computing or now
        spans = [(chunk.start, len(chunk.ids)) for chunk in plan.chunks]
        self.step_s = self.scheduler.cost.predict(spans)
        self._step_ends = now + self.step_s
        parts = [(job, start, start + count) for job, (start, count) in zip(jobs, spans, strict=True)]
        on_layer = Announcements(self._contract, parts)

        def cancelled() -> bool:
            return all(job.prompt.dropped for job in jobs)

        try:
            step = partial(self._engine.step, plan, on_layer=on_layer, cancelled=cancelled)
            output = await self._thread.run(step)
            check_written(plan, output)
        except PdserveError as error:
            return error
        except Exception:
            log.exception("a step failed")
            return Internal("the engine failed", reason="ENGINE_FAILED", remedy="see the worker's log", retryable=True)
        finally:
            self._step_ends = self.step_s = 0.0
        took_s = time.monotonic() - now
        self.scheduler.cost.observe(spans, took_s)
        self.counted.computed(sum(count for _, count in spans), took_s)
        return output

    def _apply(self, plan: StepPlan, jobs: Sequence[Job], output: StepOutput | PdserveError) -> None:
        """Books a step: logits of complete prompts go to their senders, prompts of a failed step end."""
        if isinstance(output, PdserveError):
            for job in jobs:
                self.end(job, State.FAILED, output)
            return
        for prompt in self.scheduler.apply(plan, [job.prompt for job in jobs]):
            job = self.jobs[prompt]
            try:
                job.commit(output.logits[prompt.owner])
            except Internal as error:
                self.end(job, State.FAILED, error)
            else:
                self.scheduler.commit(prompt)
                self.counted.prefill_s.observe(job.computed - job.computing)
