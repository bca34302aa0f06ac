"""Who waits, who gets pages, who computes next. Plans only: no torch, no I/O, no clock of its own.

Queues:
    waiting   producer: Generate handlers (submit); consumer: grants and expiry; bound: max_queue
    grants    producer: open pushes (Handoffs.grant), prompts that are computed here (compute_here); consumer: pump,
              first in first out; bound: part of `waiting`
    running   producer: verified handoffs (join), prompts with pages (begin); consumer: plan, oldest first, preempted
              ones included; bound: the page pool (nobody joins while one that was preempted lacks pages) and, for
              sequences that need none, max_queue (they count as waiting until their first step)

What is in a step is planning.py's. A grant takes pages for what arrives and the first growth; growth, preemption and
who goes first are memory.py's. Pages that a running step writes come back only after it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from decode_worker.memory import Memory, MemoryCounters
from decode_worker.planning import Planner
from decode_worker.prompts import Prompts
from decode_worker.sequence import EXITS, HANDOFF, FirstLogits, Outcome, Sequence, State
from decode_worker.step import DecodeOutput, DecodePlan
from decode_worker.tail import Tail
from pdserve.engine.blocks import BlockManager
from pdserve.engine.rate import Span
from pdserve.errors import Exhausted, PdserveError
from pdserve.rpc.events import Finish

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GrantRequest:
    """An open push, or a prompt to compute, that waits for pages; `granted` is called once, on the event loop."""

    sequence: Sequence
    granted: Callable[[], None]


@dataclass
class Scheduler:
    """Decides; owned by the worker's event loop, so it needs no lock.

    Whatever may bring pages back must be followed by a `plan`: only that lets a sequence grow or resume.

    Args:
        blocks: page bookkeeping; this object is its only user.
        max_queue: requests that may wait for their cache.
        max_batch: sequences of one step, prompts not counted.
        growth_watermark: share of the pool that must stay available after a grant.
        recompute_tokens: tokens that one step may compute again, over all sequences.
        prompts: how much of a step goes to prompts that are computed here.
        on_exit: told of every sequence that left, after its pages went back.
    """

    blocks: BlockManager
    max_queue: int
    max_batch: int
    growth_watermark: float = 0.0
    recompute_tokens: int = 256
    prompts: Prompts = field(default_factory=lambda: Prompts(256, 0.0))
    on_exit: Callable[[Sequence, Outcome], None] = lambda sequence, outcome: None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    grants: deque[GrantRequest] = field(default_factory=deque)
    recomputed_tokens: int = 0
    """Tokens that were computed again after a preemption, since the start."""

    def __post_init__(self) -> None:
        self._memory = Memory(self.blocks, self.waiting, self.running, self.growth_watermark)
        self._planner = Planner(
            self._memory, self.waiting, self.running, self.prompts, self.max_batch, self.recompute_tokens
        )

    @property
    def counters(self) -> MemoryCounters:
        """What became of pages since the start."""
        return self._memory.counters

    # -- before the cache is here ------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Lets a request wait, and pins the prefix this worker already holds. Raises Exhausted when full."""
        if len(self.waiting) >= self.max_queue:
            sequence.move(State.REFUSED)
            raise Exhausted(
                f"{self.max_queue} requests are waiting already",
                reason="QUEUE_FULL",
                remedy="send it to another decode worker, or wait",
            )
        if not sequence.logits_only and not sequence.here:  # what is computed here looks for it when it begins
            self._memory.pin(sequence)
        self.waiting.append(sequence)

    def compute_here(self, sequence: Sequence, cache_tokens: int, begun: Callable[[], None]) -> None:
        """No handoff for a sequence that waits and that nobody writes: it computes its prompt once it has pages.

        Args:
            cache_tokens: the largest cache it will need.
            begun: called once, maybe at once.
        """
        self._memory.release(sequence)  # a pin, which the claim of its pages finds again
        sequence.here, sequence.prefilling = True, True
        sequence.cache_tokens, sequence.cached = cache_tokens, 0

        def begin() -> None:
            sequence.move(State.PREFILLING)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            begun()

        self.request_grant(sequence, begin)

    def request_grant(self, sequence: Sequence, granted: Callable[[], None]) -> GrantRequest:
        """Queues an open push for pages; `granted` may be called at once."""
        request = GrantRequest(sequence, granted)
        self.grants.append(request)
        self.pump()
        return request

    def withdraw(self, request: GrantRequest) -> None:
        """The push no longer waits."""
        if request in self.grants:
            self.grants.remove(request)
            self.pump()

    def pump(self) -> None:
        """Gives pages to preempted sequences, then to open pushes, in order. Whoever does not fit, or lacks pages,
        holds the later ones back, so that a large request gets its turn - unless only pinned prefixes are in its way:
        those they belong to may be the later ones, or wait at their prefill worker until a later one is done.
        """
        memory = self._memory
        memory.resume()
        for request in list(self.grants):
            alone = memory.alone
            if memory.lacking and not alone:
                return
            if memory.grant(request.sequence):
                self.grants.remove(request)
                if not request.sequence.here:
                    request.sequence.move(State.GRANTED)
                request.granted()
            elif not alone:
                return

    def ungrant(self, sequence: Sequence) -> None:
        """An attempt is over and its writers have drained: its pages go back, the pin stays."""
        self.blocks.release(sequence.key)
        sequence.pages, sequence.tail = (), None
        if sequence.state in HANDOFF and sequence.state is not State.WAITING:
            sequence.move(State.WAITING)
        self.pump()

    def join(self, sequence: Sequence) -> None:
        """Every byte of its cache was verified (or its logits, if it needs only those): it may compute. First the end
        of its prompt, where the handoff brought only the beginning.
        """
        sequence.prefilling = sequence.request.split
        sequence.move(State.PREFILLING if sequence.prefilling else State.VERIFIED)
        sequence.cached = 0 if sequence.logits_only else sequence.request.handoff_end
        self._memory.publish(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._end_prompt(sequence)

    # -- decoding ----------------------------------------------------------------------------

    def plan(self) -> DecodePlan:
        """The next step: the oldest sequences whose readers keep up and that have pages; may be empty."""
        plan = self._planner.plan()
        self.pump()
        return plan

    def apply(self, plan: DecodePlan, output: DecodeOutput) -> int:
        """Books a step that has run: tokens to their streams, ended sequences out. Returns tokens given out."""
        given = 0
        self._stepped_tail(plan, output.tail)
        self._memory.copied()
        ran = {chunk.key: len(chunk.ids) for chunk in plan.step.chunks}
        for sequence in self._stepped(plan):
            self._ran(sequence, ran.get(sequence.key, 0))
            choice = output.choices.get(sequence.key)
            if sequence.ending is not None:
                self.leave(sequence, *sequence.ending)
            elif sequence.key in output.kept:
                self._computed(sequence, output.kept[sequence.key])
            elif isinstance(choice, PdserveError):
                self.leave(sequence, State.FAILED, choice)
            elif choice is not None:
                self._started(sequence)
                sequence.stream.put(sequence.generation.accept(choice))
                given += 1
                if sequence.generation.finish is not None:
                    self.complete(sequence, sequence.generation.finish)
        return given

    def abandon(self, plan: DecodePlan, error: PdserveError) -> None:
        """Books a step that raised: its sequences fail, since what their pages now hold is unknown."""
        self._stepped_tail(plan, error)
        self._memory.copied()
        for sequence in self._stepped(plan):
            self.leave(sequence, *(sequence.ending or (State.FAILED, error)))

    # -- the end -----------------------------------------------------------------------------

    def complete(self, sequence: Sequence, finish: Finish) -> None:
        """The output is whole: its full pages become findable, all of them go back."""
        self._memory.publish(sequence)
        shared, copied = sequence.shared_pages, sequence.copied_pages
        sequence.stream.put(replace(finish, shared_pages=shared, copied_pages=copied) if shared else finish)
        self._leave(sequence, Outcome(sequence.key, State.DONE))

    def leave(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        """Ends a sequence early. Its step is over and its writers have drained."""
        sequence.stream.fail(error)
        self._leave(sequence, Outcome(sequence.key, state, error))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def beside(self) -> list[Span]:
        """What the streams that run now have in each step."""
        return [(s.cached, 1) for s in self.running if s.state in (State.VERIFIED, State.DECODING) and s.ready]

    @property
    def unfinished(self) -> list[Sequence]:
        """Whose prompts are to be computed here, or are being computed."""
        return [s for s in (*self.running, *self.waiting) if s.prefilling and s.ending is None]

    @property
    def running_tail(self) -> Tail | None:
        """Whose pages the step that runs holds, even if its sequence has left."""
        return self._planner.tail

    @property
    def expected_tokens(self) -> int:
        """Of prompts whose beginning is on its way, to be computed here."""
        split = (s.request for s in self.waiting if s.request.split and s.awaits_handoff and s.ending is None)
        return sum(len(request.ids) - request.handoff_end for request in split)

    def _stepped_tail(self, plan: DecodePlan, output: FirstLogits | PdserveError | None) -> None:
        """Books a tail's layers, unless its sequence has ended or lost it."""
        tail = plan.tail
        if tail is None:
            return
        self.blocks.release(tail.owner)
        self._planner.tail = None
        sequence = next((s for s in (*self.waiting, *self.running) if s.tail is tail), None)
        if sequence is None:
            return
        tail.done += plan.tail_layers
        tail.steps += 1
        if isinstance(output, PdserveError):
            log.error("%s: its end is computed once its beginning is here: %s", sequence.key, output)
            sequence.tail = None
        elif output is not None:
            tail.first = output
            self.prompts.computed += len(tail.chunk.ids)
            if sequence.prefilling:  # else `join` does it, once the handoff is verified
                self._end_prompt(sequence)

    def _end_prompt(self, sequence: Sequence) -> None:
        """If its whole prompt is here, verified and computed, its first token may be sampled, or its outputs begin."""
        tail = sequence.tail
        if sequence.prefilling and tail is not None and tail.first is not None:
            sequence.first, sequence.tail, sequence.prefilling = tail.first, None, False
            sequence.cached = len(sequence.ids)
            sequence.move(State.VERIFIED)
            self._memory.publish(sequence)
            sequence.stream.put(tail.account(sequence.work.asked_at))
        if sequence.choices and not sequence.prefilling:
            self.running.remove(sequence)
            self._fork(sequence)

    def _ran(self, sequence: Sequence, tokens: int) -> None:
        """Books the chunk of a step."""
        self.recomputed_tokens += min(tokens, max(0, sequence.reached - sequence.cached))
        sequence.cached += tokens
        if sequence.prefilling:
            self.prompts.computed += tokens
            sequence.work.computed += tokens
            sequence.work.chunks += 1

    def _computed(self, sequence: Sequence, first: FirstLogits) -> None:
        """A prompt with several outputs was computed here."""
        sequence.first, sequence.prefilling = first, False
        self._memory.publish(sequence)
        self.running.remove(sequence)
        self._fork(sequence)

    def _fork(self, sequence: Sequence) -> None:
        """Its outputs run from here on, each as a sequence of its own; it is in no queue any more."""
        for finish in sequence.replayed:
            sequence.stream.put(finish)
        self._memory.fork(sequence)
        sequence.move(State.FORKED)
        self.running += sequence.choices

    def _started(self, sequence: Sequence) -> None:
        """A token was sampled."""
        sequence.first = None
        if sequence.prefilling:
            sequence.prefilling = False
            self._memory.publish(sequence)
        if sequence.state in (State.VERIFIED, State.PREFILLING):
            sequence.move(State.DECODING)

    def _leave(self, sequence: Sequence, outcome: Outcome) -> None:
        if sequence.state in EXITS:
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        for request in [r for r in self.grants if r.sequence is sequence]:
            self.grants.remove(request)
        sequence.move(outcome.state)
        self._memory.release(sequence)
        self.on_exit(sequence, outcome)
        self.pump()

    def _stepped(self, plan: DecodePlan) -> Iterable[Sequence]:
        keys = {chunk.key for chunk in plan.step.chunks} | plan.first.keys()
        for sequence in [s for s in self.running if s.key in keys]:
            sequence.stepping = False
            yield sequence
