"""Who waits, who gets pages, who computes next. Plans only: no torch, no I/O, no clock of its own.

Queues:
    waiting   producer: Generate handlers (submit); consumer: grants and expiry; bound: max_queue
    grants    producer: open pushes (Handoffs.grant); consumer: pump, first in first out; bound: part of `waiting`
    running   producer: verified handoffs (join); consumer: plan; bound: the page pool and, for
              sequences that need none, max_queue (they count as waiting until their first step)

A grant takes all pages that prompt and output can ever need, so a running sequence never
waits for memory. Pages that a running step writes come back only after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from decode_worker.sequence import EXITS, HANDOFF, RUNNING, Outcome, Sequence, State
from decode_worker.step import DecodeOutput, DecodePlan
from pdserve.engine.blocks import BlockManager
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.errors import Exhausted, PdserveError
from pdserve.rpc.events import Finish


@dataclass(eq=False)
class GrantRequest:
    """An open push that waits for pages; `granted` is called once, on the event loop."""

    sequence: Sequence
    granted: Callable[[], None]


@dataclass
class Scheduler:
    """Decides; owned by the worker's event loop, so it needs no lock.

    Args:
        blocks: page bookkeeping; this object is its only user.
        page_size: tokens per page.
        max_queue: requests that may wait for their cache.
        max_batch: sequences of one step.
        on_exit: told of every sequence that left, after its pages went back.
    """

    blocks: BlockManager
    page_size: int
    max_queue: int
    max_batch: int
    on_exit: Callable[[Sequence, Outcome], None] = lambda sequence, outcome: None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    grants: deque[GrantRequest] = field(default_factory=deque)

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
        if not sequence.logits_only:
            # The last token's logits must be computed, so at least that token travels.
            pages, tokens = self.blocks.match(sequence.prefix, len(sequence.ids) - 1)
            if len(pages) + self.pinned <= self.blocks.pages // 2:
                self.blocks.retain(sequence.pin, pages)
                sequence.held, sequence.cached = pages, tokens
        self.waiting.append(sequence)

    @property
    def pinned(self) -> int:
        """Pages pinned by requests that have no grant yet, shared ones counted once per request."""
        return sum(len(s.held) for s in self.waiting if not s.pages)

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
        """Gives pages to open pushes, in order.

        A push that does not fit holds the later ones back, so that a large request gets its
        turn - unless nothing but their own pinned prefixes is in its way, which would never end.
        """
        waits = list(self.grants)
        for request in waits:
            sequence = request.sequence
            try:
                fresh = self.blocks.allocate(sequence.key, self._fresh_pages(sequence))
            except Exhausted:
                if any(s.pages for s in self.waiting) or any(s.pages for s in self.running):
                    return
                continue
            self.grants.remove(request)
            sequence.pages = (*sequence.held, *fresh)
            sequence.move(State.GRANTED)
            request.granted()

    def ungrant(self, sequence: Sequence) -> None:
        """An attempt is over and its writers have drained: its pages go back, the pin stays."""
        self.blocks.release(sequence.key)
        sequence.pages = ()
        if sequence.state in HANDOFF and sequence.state is not State.WAITING:
            sequence.move(State.WAITING)
        self.pump()

    def join(self, sequence: Sequence) -> None:
        """Every byte of its cache was verified (or its logits, if it needs only those): it may compute."""
        sequence.move(State.VERIFIED)
        sequence.cached = 0 if sequence.logits_only else len(sequence.ids)
        self._publish(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)

    # -- decoding ----------------------------------------------------------------------------

    def plan(self) -> DecodePlan:
        """The next step: the oldest sequences whose readers keep up; empty when there are none."""
        ready = [s for s in self.running if s.ending is None and s.stream.full_since is None][: self.max_batch]
        plan = DecodePlan(
            step=StepPlan(tuple(self._chunk(s) for s in ready if s.first is None)),
            first={s.key: s.first for s in ready if s.first is not None},
            samplers={s.key: s.generation.sampler for s in ready},
        )
        for sequence in ready:
            sequence.stepping = True
        return plan

    def apply(self, plan: DecodePlan, output: DecodeOutput) -> int:
        """Books a step that has run: tokens to their streams, ended sequences out. Returns tokens given out."""
        given = 0
        for sequence in self._stepped(plan):
            if sequence.first is None:
                sequence.cached += 1
            choice = output.choices[sequence.key]
            if sequence.ending is not None:
                self.leave(sequence, *sequence.ending)
            elif isinstance(choice, PdserveError):
                self.leave(sequence, State.FAILED, choice)
            else:
                sequence.first = None
                if sequence.state is State.VERIFIED:
                    sequence.move(State.DECODING)
                sequence.stream.put(sequence.generation.accept(choice))
                given += 1
                if sequence.generation.finish is not None:
                    self.complete(sequence, sequence.generation.finish)
        return given

    def abandon(self, plan: DecodePlan, error: PdserveError) -> None:
        """Books a step that raised: its sequences fail, since what their pages now hold is unknown."""
        for sequence in self._stepped(plan):
            self.leave(sequence, *(sequence.ending or (State.FAILED, error)))

    # -- the end -----------------------------------------------------------------------------

    def complete(self, sequence: Sequence, finish: Finish) -> None:
        """The output is whole: its full pages become findable, all of them go back."""
        sequence.prefix.extend(sequence.generation.output[len(sequence.request.output_ids) :])
        self._publish(sequence)
        sequence.stream.put(finish)
        self._leave(sequence, Outcome(sequence.key, State.DONE))

    def leave(self, sequence: Sequence, state: State, error: PdserveError) -> None:
        """Ends a sequence early. Its step is over and its writers have drained."""
        sequence.stream.fail(error)
        self._leave(sequence, Outcome(sequence.key, state, error))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def _leave(self, sequence: Sequence, outcome: Outcome) -> None:
        if sequence.state in EXITS:
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        for request in [r for r in self.grants if r.sequence is sequence]:
            self.grants.remove(request)
        sequence.move(outcome.state)
        self.blocks.release(sequence.key)
        self.blocks.release(sequence.pin)
        sequence.pages = sequence.held = ()
        self.on_exit(sequence, outcome)
        self.pump()

    def _stepped(self, plan: DecodePlan) -> Iterable[Sequence]:
        for sequence in [s for s in self.running if s.key in plan.samplers]:
            sequence.stepping = False
            yield sequence

    def _fresh_pages(self, sequence: Sequence) -> int:
        return -(-sequence.cache_tokens // self.page_size) - len(sequence.held)

    def _publish(self, sequence: Sequence) -> None:
        """Full pages of verified content only: the handoff's tokens, then what was decoded."""
        if sequence.pages and sequence.state in RUNNING:
            self.blocks.publish(sequence.prefix, sequence.pages[: sequence.cached // self.page_size])

    def _chunk(self, sequence: Sequence) -> Chunk:
        """One decode token: the last one sampled, which is not in the cache yet."""
        end = sequence.cached + 1
        return Chunk(
            key=sequence.key,
            ids=(sequence.generation.output[-1],),
            start=sequence.cached,
            pages=sequence.pages[: -(-end // self.page_size)],
        )
