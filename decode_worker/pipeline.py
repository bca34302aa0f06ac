"""What happens to a request between Decode/Generate and its last token.

    Decode/Generate --> submit(): check, pin, ticket --> waiting
    Transfer/Push   --> Receiver --> Handoffs: grant, verified --> running
                                                                     |
                        loop: plan, engine step and sampler, apply --+--> the sequence's stream --> Generate

Who ends a sequence early: its caller (closed stream), the reaper (deadline over, reader gone),
drain, a failed step; all through `end`. Its pages go back in `Scheduler.leave`, once neither
a step nor a receiver's thread writes them any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Series

from cache_transfer.contract import Ticket, WorkerContract, check_compatible
from decode_worker.admission import Admission, DecodeRequest, Limits, cache_identity, check_request
from decode_worker.generation import Generation
from decode_worker.handoffs import Handoffs
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import EXITS, HANDOFF, Outcome, Sequence, State
from decode_worker.settings import DecodeSettings
from decode_worker.step import DecodePlan, step_and_sample
from decode_worker.stream import EventStream
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.plan import StepCounters
from pdserve.engine.runner import EngineThread
from pdserve.errors import DeadlineExceeded, Internal, PdserveError
from pdserve.rpc.background import Background
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
    ) -> None:
        self.scheduler = Scheduler(
            blocks, limits.page_size, settings.max_queue, settings.max_batch, on_exit=self._on_exit
        )
        self._wake = asyncio.Event()  # there may be something to plan
        self.handoffs = Handoffs(
            incarnation, limits.contract, self.scheduler, engine.cache, settings, changed=self._wake.set
        )
        self.quiet = asyncio.Event()
        """Set while no sequence is here."""
        self.quiet.set()
        self.tokens_per_s = 0.0  # output tokens over step time, smoothed
        self.counters = StepCounters()  # logical work of all steps so far
        self._engine = engine
        self._limits = limits
        self._settings = settings
        self._thread = thread
        self._background = background
        self._tokenizer = tokenizer
        self._count = 0  # requests ever submitted

    @property
    def sequences(self) -> Series[Sequence]:
        return (*self.scheduler.waiting, *self.scheduler.running)

    def submit(self, request: DecodeRequest) -> tuple[Sequence, Admission, Ticket | None]:
        """Checks a request and lets it wait for its cache. No ticket: replaying its output already ended it.

        Raises what `check_request` raises, and Exhausted (QUEUE_FULL).
        """
        admission = check_request(request, self._limits)
        self._count += 1
        generation = Generation(
            request.prompt_ids, request.sampling, admission.limit, self._limits.eos_ids, self._tokenizer
        )
        sequence = Sequence(
            key=f"{request.request_id}#{self._count}",
            request=request,
            generation=generation,
            stream=EventStream(self._settings.max_unread_tokens, self._wake.set),
            cache_identity=cache_identity(self._limits.contract, request.adapter, request.tenant),
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
        self.quiet.clear()
        return sequence, admission, self.handoffs.open(sequence)

    async def retry(self, sequence: Sequence, prefill_contract: WorkerContract) -> None:
        """Puts the next attempt's ticket on the stream, unless the cache is complete already.

        Raises Incompatible naming the field, Refused when the request is over.
        """
        check_compatible(prefill_contract, self._limits.contract)
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
            self._background.spawn(self._drain(sequence, state, error), f"end of {sequence.key}")
        elif not sequence.stepping:  # else `apply` or `abandon` sees to it
            self.scheduler.leave(sequence, state, error)

    def fail_all(self, error: PdserveError) -> None:
        """For a worker whose loop died: no step runs, and none will."""
        for sequence in self.sequences:
            sequence.stepping = False
            if sequence.ending is None:
                self.end(sequence, State.FAILED, error)
            else:
                self.scheduler.leave(sequence, *sequence.ending)

    async def loop(self) -> None:
        while True:
            self._wake.clear()
            plan = self.scheduler.plan()
            if plan.samplers:
                await self._step(plan)
            else:
                await self._wake.wait()

    def reap(self, now: float) -> None:
        """Ends what took too long. `now` in monotonic seconds."""
        for sequence in [s for s in self.scheduler.waiting if now >= s.deadline]:
            self.end(sequence, State.EXPIRED, _expired(sequence))
        for sequence in list(self.scheduler.running):
            since = sequence.stream.full_since
            if since is not None and now >= since + self._settings.reader_s:
                self.end(sequence, State.EXPIRED, _unread(sequence, self._settings.reader_s))

    async def _step(self, plan: DecodePlan) -> None:
        began = time.monotonic()
        try:
            output = await self._thread.run(step_and_sample, self._engine, plan)
        except PdserveError as error:
            log.error("a step of %d sequences failed: %s", len(plan.samplers), error)
            self.scheduler.abandon(plan, error)
        except Exception:
            log.exception("a step of %d sequences failed", len(plan.samplers))
            self.scheduler.abandon(plan, Internal("the engine failed", remedy="see the worker's log"))
        else:
            self.counters += output.counters
            given = self.scheduler.apply(plan, output)
            self.tokens_per_s += 0.1 * (given / max(time.monotonic() - began, 1e-9) - self.tokens_per_s)

    async def _drain(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        await self.handoffs.close(sequence)
        self.scheduler.leave(sequence, state, error)

    def _on_exit(self, sequence: Sequence, outcome: Outcome) -> None:
        self.handoffs.forget(sequence)
        log.info("%s: %s%s", outcome.key, outcome.state, f" ({outcome.error})" if outcome.error else "")
        if self.scheduler.idle:
            self.quiet.set()
        self._wake.set()


def _expired(sequence: Sequence) -> DeadlineExceeded:
    if sequence.state is not State.WAITING:
        return DeadlineExceeded("the cache did not arrive in time", reason="RECEIVE_TIMEOUT", retryable=True)
    cause = f"; the last attempt failed: {sequence.attempt_error}" if sequence.attempt_error else ""
    return DeadlineExceeded(
        f"no cache came before the ticket expired{cause}",
        reason="TICKET_EXPIRED",
        remedy="send it to another pair of workers",
        retryable=True,
    )


def _unread(sequence: Sequence, limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the reader left {sequence.stream.unread} tokens unread for {limit_s:g} s",
        reason="SLOW_READER",
        remedy="read the stream faster",
    )
