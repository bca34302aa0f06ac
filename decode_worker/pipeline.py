"""What happens to a request between Decode/Generate and its last token.

    Decode/Generate --> submit(): check, pin, ticket --> waiting
    Transfer/Push   --> Receiver --> Handoffs: grant, verified --> running
    no handoff      --> compute_here: pages -------------------------+
                                                                     |
                        loop: plan, engine step and sampler, apply --+--> the sequence's stream --> Generate

Who ends a sequence early: its caller (closed stream), the reaper (deadline over, reader gone),
drain, a failed or stalled step; all through `end`. Its caller is told at once; its pages go back
in `Scheduler.leave`, once neither a step nor a receiver's thread writes them any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence as Series

from cache_transfer.contract import Ticket, WorkerContract, check_compatible
from decode_worker.admission import (
    Admission,
    DecodeRequest,
    Limits,
    cache_tokens_here,
    check_request,
    check_same_numerics,
)
from decode_worker.grammar import Grammars
from decode_worker.handoffs import Handoffs
from decode_worker.metrics import Counted
from decode_worker.opening import Opener
from decode_worker.overdue import expired, unread
from decode_worker.prompts import Prompts
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import EXITS, FirstLogits, Outcome, Sequence, State
from decode_worker.settings import DecodeSettings
from decode_worker.step import DecodeOutput, DecodePlan, step_and_sample
from decode_worker.stream import EventStream
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.plan import StepCounters
from pdserve.engine.runner import EngineThread
from pdserve.errors import Internal, PdserveError, Refused, Unavailable
from pdserve.request import Grammar
from pdserve.rpc.background import Background
from pdserve.rpc.events import Prefilled
from pdserve.telemetry.logs import about, quoteless
from pdserve.telemetry.traces import OFF, Traces
from pdserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Pipeline:
    """Every sequence of one worker. Event loop only; the engine is stepped in `thread`."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        settings: DecodeSettings,
        blocks: BlockManager,
        thread: EngineThread,
        background: Background,
        tokenizer: Tokenizer | None,
        incarnation: bytes,
        traces: Traces = OFF,
    ) -> None:
        self.scheduler = Scheduler(
            blocks,
            settings.max_queue,
            settings.max_batch,
            settings.growth_watermark,
            settings.recompute_tokens,
            Prompts(settings.chunk_tokens, settings.step_ms / 1000),
            on_exit=self._on_exit,
        )
        self._wake = asyncio.Event()  # there may be something to plan
        self.counted = Counted()
        self.handoffs = Handoffs(
            incarnation, limits.contract, self.scheduler, engine.cache, settings, self._wake.set, self.counted, traces
        )
        self.quiet = asyncio.Event()
        """Set while no sequence is here."""
        self.quiet.set()
        self.tokens_per_s = 0.0  # output tokens over step time, smoothed
        self.step_s = 0.0  # of the running step, as expected; 0: none runs
        self.counters = StepCounters()  # logical work of all steps so far
        self._engine = engine
        self._limits = limits
        self._settings = settings
        self._thread = thread
        self._background = background
        self._grammars = Grammars(tokenizer, limits.contract.vocab_size)
        self._opener = Opener(limits, tokenizer, self._grammars)
        self._count = 0  # requests ever submitted

    @property
    def sequences(self) -> Series[Sequence]:
        return (*self.scheduler.waiting, *self.scheduler.running)

    @property
    def count(self) -> int:
        return len(self.sequences)

    @property
    def adapters_in_use(self) -> tuple[bytes | None, ...]:
        tail = self.scheduler.running_tail  # its sequence may have left
        running = () if tail is None else (tail.chunk.adapter,)
        return (*running, *(sequence.request.adapter for sequence in self.sequences))

    async def prepare(self, grammar: Grammar) -> None:
        """Compiles it off the loop, so that `submit` finds it. Raises InvalidRequest (INVALID_GRAMMAR)."""
        grammar.check()
        if not self._grammars.has(grammar):
            await asyncio.to_thread(self._grammars.prepare, grammar)

    def submit(self, request: DecodeRequest, deadline_s: float = math.inf) -> tuple[Sequence, Admission, Ticket | None]:
        """Checks a request and lets it wait for its cache. No ticket: its prompt is computed here, or replaying its
        output already ended it, and it is DONE.

        Args:
            deadline_s: what the caller's own deadline leaves; `generate_s` bounds it.

        Raises what `check_request` raises, and Exhausted (QUEUE_FULL).
        """
        admission = check_request(request, self._limits)
        self._count += 1
        stream = EventStream(self._settings.max_unread_tokens, self._wake.set, outputs=max(1, len(request.choices)))
        sequence = self._opener.open(
            f"{request.request_id}#{self._count}",
            request,
            admission,
            stream,
            time.monotonic() + min(deadline_s, self._settings.generate_s),
        )
        if sequence.state is State.DONE:
            self.counted.ended.add(State.DONE)
            return sequence, admission, None
        sequence.here = request.here
        self.scheduler.submit(sequence)
        self.quiet.clear()
        if request.here:
            self._compute_here(sequence, admission.cache_tokens)
            return sequence, admission, None
        if not sequence.logits_only:
            self.counted.looked_for(sequence.request.handoff_end, sequence.cached)
        if request.split:
            sequence.work.asked_at = time.monotonic()
            sequence.wanted_by = sequence.work.asked_at + (self._settings.first_token_s or math.inf)
        return sequence, admission, self.handoffs.open(sequence)

    async def retry(self, sequence: Sequence, prefill_contract: WorkerContract) -> None:
        """Puts the next attempt's ticket on the stream, unless the cache is complete already.

        Raises Incompatible naming the field, Refused when the request is over or has no handoff.
        """
        if sequence.here:
            raise Refused("this worker computes the prompt itself", reason="NO_HANDOFF", remedy="wait for its tokens")
        check_compatible(prefill_contract, self._limits.contract)
        check_same_numerics(prefill_contract, sequence.request)
        ticket = await self.handoffs.retry(sequence)
        if ticket is not None:
            sequence.stream.put(ticket)

    async def compute_here(self, sequence: Sequence) -> None:
        """Gives the handoff up and computes the prompt here, unless the cache is complete already.

        Raises Refused: NUMERICS_CHANGED, POOL_TOO_SMALL.
        """
        if not sequence.awaits_handoff:
            return
        check_same_numerics(self._limits.contract, sequence.request)
        cache_tokens = cache_tokens_here(sequence.request, sequence.generation.limit, self._limits)
        await self.handoffs.close(sequence)
        if sequence.ending is None and sequence.awaits_handoff:
            self.scheduler.ungrant(sequence)
            self._compute_here(sequence, cache_tokens)

    def _compute_here(self, sequence: Sequence, cache_tokens: int) -> None:
        """Its writers have drained, if there ever were any."""
        sequence.work.asked_at = time.monotonic()
        sequence.wanted_by = sequence.work.asked_at + (self._settings.first_token_s or math.inf)
        sequence.arrives_by, sequence.deadline = math.inf, sequence.ends_at
        self.scheduler.compute_here(sequence, cache_tokens, begun=self._wake.set)

    def end(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        """Ends a sequence early, or the outputs that it has become, once nothing writes its pages. The first reason
        counts; idempotent.
        """
        if sequence.state is State.FORKED:
            for choice in sequence.choices:
                self.end(choice, state, error)
        if sequence.state in EXITS or sequence.ending is not None:
            return
        sequence.ending = (state, error)
        sequence.stream.fail(error)  # what follows may take long: a step can hang
        if sequence.awaits_handoff:
            self.handoffs.forget(sequence)
            self._background.spawn(self._drain(sequence, state, error), f"end of {sequence.key}")
        elif not sequence.stepping:  # else `_step` sees to it when the step is over
            self.scheduler.leave(sequence, state, error)

    def end_all(self, error: PdserveError) -> None:
        """Tells every sequence to end; one whose step runs leaves after it."""
        state = State.ABORTED if isinstance(error, Unavailable) else State.FAILED
        for sequence in self.sequences:
            self.end(sequence, state, error)

    async def loop(self) -> None:
        while True:
            self._wake.clear()
            plan = self.scheduler.plan()
            if plan.size:
                await self._step(plan)
                self._look_quiet()
            else:
                self.step_s = 0.0
                await self._wake.wait()

    def reap(self, now: float) -> None:
        """Ends what took too long. `now` in monotonic seconds."""
        for sequence in [s for s in self.scheduler.waiting if now >= s.deadline]:
            self._reap(sequence, expired(sequence, now))
        for sequence in list(self.scheduler.running):
            since = sequence.stream.full_since
            if now >= sequence.ends_at:
                self._reap(sequence, expired(sequence, now))
            elif since is not None and now >= since + self._settings.reader_s:
                self._reap(sequence, unread(sequence, self._settings.reader_s))

    def _reap(self, sequence: Sequence, error: PdserveError) -> None:
        if sequence.ending is None:  # else it was told before, and waits for a step or writers
            self.counted.reaped.add(error.reason)
            self.end(sequence, State.EXPIRED, error)

    async def _step(self, plan: DecodePlan) -> None:
        began = time.monotonic()
        spans = plan.spans
        self.step_s = self.scheduler.prompts.cost.predict(plan.all_spans)
        if plan.tail is not None:
            plan.tail.began_at = plan.tail.began_at or began
        prefilling = [s for s in self.scheduler.running if s.stepping and s.prefilling]
        for sequence in prefilling:
            sequence.work.began_at = sequence.work.began_at or began
        try:
            output = await self._thread.run(step_and_sample, self._engine, plan)
        except PdserveError as error:
            log.error("a step of %d sequences failed: %s", plan.size, error)
            self.scheduler.abandon(plan, error)
            return
        except Exception:
            log.exception("a step of %d sequences failed", plan.size)
            self.scheduler.abandon(plan, Internal("the engine failed", remedy="see the worker's log"))
            return
        self.counters += output.counters
        ended = time.monotonic()
        self._learn(plan, output, ended - began)
        for sequence in prefilling:
            if sequence.key in output.choices or sequence.key in output.kept:  # its token follows
                sequence.stream.put(prefilled(sequence, plan, ended))
                if sequence.here:  # else it was looked for when the request came
                    self.counted.looked_for(len(sequence.ids), sequence.work.found)
        try:
            given = self.scheduler.apply(plan, output)
        except Exception:  # the loop dies of it; the step is over all the same, so nothing may wait for it
            self.scheduler.abandon(plan, Internal("the decode worker failed", remedy="see its log", retryable=True))
            raise
        self.counted.stepped(sum(count for _, count in plan.all_spans), given, ended - began)
        if spans:
            self.tokens_per_s += 0.1 * (given / max(time.monotonic() - began, 1e-9) - self.tokens_per_s)

    def _learn(self, plan: DecodePlan, output: DecodeOutput, seconds: float) -> None:
        """What steps cost here. The layers of a tail are one chunk, once all have run: some of them at a time say
        nothing of what belongs to a step and what to a token.
        """
        prompts, tail = self.scheduler.prompts, plan.tail
        if plan.spans:
            prompts.learn(plan.spans, seconds - (tail.last_s if tail is not None else 0.0))
        if tail is not None and isinstance(output.tail, FirstLogits):
            prompts.learn([(tail.chunk.start, len(tail.chunk.ids))], tail.spent_s)

    async def _drain(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        await self.handoffs.close(sequence)
        self.scheduler.leave(sequence, state, error)

    def _on_exit(self, sequence: Sequence, outcome: Outcome) -> None:
        origin = sequence.origin
        if origin is not None and outcome.error is not None:  # an answer is all of its outputs, or none
            self.end(origin, outcome.state, outcome.error)
        if origin is None or all(choice.state in EXITS for choice in origin.choices):
            self.handoffs.forget(origin or sequence)
            self.counted.ended.add(outcome.state)
        error = f" ({quoteless(outcome.error)})" if outcome.error else ""
        log.info("%s: %s%s", outcome.key, outcome.state, error, extra=about(sequence.scope))
        self._look_quiet()
        self._wake.set()

    def _look_quiet(self) -> None:
        """No sequence is here, and no step computes for one that has left."""
        if self.scheduler.idle and self.scheduler.running_tail is None:
            self.quiet.set()


def prefilled(sequence: Sequence, plan: DecodePlan, now: float) -> Prefilled:
    """The account of a prompt whose last chunk is in `plan`, which has run but is not booked yet."""
    work = sequence.work
    last = next(len(chunk.ids) for chunk in plan.step.chunks if chunk.key == sequence.key)
    return Prefilled(
        computed_tokens=work.computed + last,
        cached_tokens=work.found,
        queued_ms=1000 * (work.began_at - work.asked_at),
        prefill_ms=1000 * (now - work.began_at),
        chunks=work.chunks + 1,
    )
