"""Which prompt computes next, and who holds which pages. Plans only: no torch, no I/O.

The life of one prompt:

    submit()        admit()             commit(): logits are sound   release(RELEASED): decode acknowledged
      |  QUEUED ------> RUNNING -----------------> COMMITTED -----------------> RELEASED
      |    |              |                            |
      |    |              +--------------+-------------+---> EXPIRED   lease or deadline over
      |    |                             |             +---> REFUSED   decode refused the handoff
      |    +---> EXPIRED, ABORTED        |             +---> ABORTED   the caller cancelled, or the worker drains
      +--------> REFUSED (queue full)    |             +---> FAILED    engine or transfer fault
                                         +--------------> (the same four exits)

A queued prompt holds no pages, here or at decode. It leaves the queue when the order (order.py) gives it a part of the
next step: then `admit` gives it all pages of its prompt at once, under a lease; `release` returns them; its caller sees
to it that no step writes them and no sender reads them.

A prompt whose pages are not there is passed over, so that short prompts go on; but once prompts of PASSES times its
tokens have been admitted past it, nobody else is admitted until it is: after those that hold pages now, whose leases
end, it is next.

Queues:
    waiting   producer: the RPC handlers (submit); consumer: the worker's loop (admit); bound: max_queue prompts
    running   producer: admit; consumer: the worker's loop (plan, release); bound: max_running prompts,
              counted until their pages return, so a slow decode worker holds the queue back, not memory
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.engine.blocks import BlockManager
from pdserve.engine.order import RESERVE, Shares, Turns, pressing, share_out
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.prefix import Prefix
from pdserve.engine.rate import TOLD_S, Span, StepCost
from pdserve.errors import Exhausted

PASSES = RESERVE - 1


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMMITTED = "committed"
    RELEASED = "released"
    REFUSED = "refused"
    EXPIRED = "expired"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(eq=False)
class Prompt:
    """One prompt on its way through the worker. Only the scheduler changes it."""

    owner: str  # who holds the pages; unique among the prompts of this worker
    ids: tuple[int, ...]  # everything to compute: prompt ids, then output ids already delivered
    prefix: Prefix  # its full pages, as other prompts may find them
    deadline: float  # monotonic seconds: the caller's, or the end of the lease if that is earlier
    queue_deadline: float  # latest time to leave the queue: after it the ticket is of no use
    tenant: str = ""
    adapter: bytes | None = None
    wanted_by: float = math.inf  # monotonic seconds: an objective for its first token
    number: int = 0  # in the order of arrival; `submit` counts
    state: State = State.QUEUED
    pages: tuple[int, ...] = ()
    cached: int = 0  # tokens found in the prefix index
    done: int = 0  # tokens [0, done) are in the pages; of a queued prompt: were found there when it came
    chunks: int = 0  # engine steps it took so far
    lacked_at: int = -1  # `BlockManager.changes` when its pages last did not fit
    passed: int = 0  # tokens of prompts that were admitted since its pages first did not fit
    dropped: bool = False  # no more steps: failed or cancelled; read by the engine's thread

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.done


@dataclass
class Scheduler:
    """Decides; owned by the worker's event loop, so it needs no lock.

    Args:
        blocks: page bookkeeping; this object is its only user.
        page_size: tokens per page.
        chunk_tokens: tokens of one step at most, over all its prompts; at least RESERVE.
        batch_tokens: up to which a step of short prompts is filled with others.
        step_s: seconds that a step should take at most; it is halved, down to `batch_tokens`, until it is expected to.
        max_queue: prompts that may wait.
        max_running: prompts that may hold pages.
        lease_s: seconds a prompt may hold pages.
    """

    blocks: BlockManager
    page_size: int
    chunk_tokens: int
    batch_tokens: int
    step_s: float
    max_queue: int
    max_running: int
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    """Only asked for prompts with an objective."""
    waiting: list[Prompt] = field(default_factory=list)
    running: list[Prompt] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    cost: StepCost = field(default_factory=lambda: StepCost(TOLD_S))
    """What steps take here; whoever runs them tells it."""
    _submitted: int = 0

    def submit(self, prompt: Prompt, retry_after_ms: int = 0) -> None:
        """Queues a prompt. Raises Exhausted when the queue is full."""
        if len(self.waiting) >= self.max_queue:
            prompt.state = State.REFUSED
            raise Exhausted(
                f"{self.max_queue} prompts are waiting already",
                reason="QUEUE_FULL",
                remedy="send it to another prefill worker, or wait",
                retry_after_ms=retry_after_ms,
            )
        self._submitted += 1
        prompt.number = self._submitted
        # Its place in the order: a long prompt that is mostly cached is a short one.
        _, prompt.done = self.blocks.match(prompt.prefix, len(prompt.ids) - 1)
        self.waiting.append(prompt)
        self._keep_turns()

    def admit(self, now: float) -> list[Prompt]:
        """Takes off the queue whoever has a part of the next step, while pages and places last."""
        admitted: list[Prompt] = []
        while len(self.running) < self.max_running and (prompt := self._next_to_admit()):
            self.waiting.remove(prompt)
            prompt.state = State.RUNNING
            prompt.deadline = min(prompt.deadline, now + self.lease_s)
            self.running.append(prompt)
            admitted.append(prompt)
            for other in self.waiting:
                if other.lacked_at >= 0:
                    other.passed += len(prompt.ids)
        return admitted

    def plan(self) -> tuple[StepPlan, list[Prompt]]:
        """The next step and the prompts in it, see order.py; both empty when nothing can compute."""
        prompts = self._ready()
        limit, first = self.chunk_tokens, self._pressing(prompts)
        shares = share_out(prompts, self.turns, limit, self.batch_tokens, first)
        while limit > self.batch_tokens and self.cost.predict(_spans(prompts, shares)) > self.step_s:
            limit = max(limit // 2, self.batch_tokens)
            shares = share_out(prompts, self.turns, limit, self.batch_tokens, first)
        self.turns.took((prompts[index].tenant, tokens) for index, tokens in shares.reserved.items())
        chosen = [(prompts[index], shares.of(index)) for index in shares.chosen]
        return StepPlan(tuple(self._chunk(prompt, take) for prompt, take in chosen)), [p for p, _ in chosen]

    def apply(self, plan: StepPlan, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Books a step that has run. Returns the prompts whose last chunk it was: to be checked, then committed."""
        finished = []
        for chunk, prompt in zip(plan.chunks, prompts, strict=True):
            prompt.done += len(chunk.ids)
            prompt.chunks += 1
            if not prompt.remaining and not prompt.dropped:
                finished.append(prompt)
        return finished

    def commit(self, prompt: Prompt) -> None:
        """What its pages hold was found to be sound: full ones may be found from now on."""
        prompt.state = State.COMMITTED
        self.blocks.publish(prompt.prefix, prompt.pages[: len(prompt.ids) // self.page_size])

    def drop(self, prompt: Prompt) -> None:
        """No more steps for it; its pages stay until `release`."""
        prompt.dropped = True

    def release(self, prompt: Prompt, state: State) -> None:
        """Ends a prompt in `state` and returns its pages. Its step is over and its readers have drained."""
        prompt.state, prompt.dropped = state, True
        if prompt in self.waiting:
            self.waiting.remove(prompt)
        if prompt in self.running:
            self.running.remove(prompt)
            self.blocks.release(prompt.owner)
            prompt.pages = ()
        self._keep_turns()

    def overdue(self, now: float) -> list[Prompt]:
        """Prompts whose wait or lease is over."""
        late = [p for p in self.waiting if now >= min(p.deadline, p.queue_deadline)]
        return late + [p for p in self.running if now >= p.deadline and not p.dropped]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def queued_tokens(self) -> int:
        """Tokens still to compute, waiting and running."""
        return sum(p.remaining for p in itertools.chain(self.waiting, self.running) if not p.dropped)

    def wait_s(self, tokens: int) -> float:
        """Seconds of steps before a prompt of so many tokens that came now would begin; 0 while no step has run."""
        ahead = sum(p.remaining for p in (*self.waiting, *self.running) if not p.dropped and p.remaining <= tokens)
        # Those who wait longest compute besides, as long as there are any.
        ahead = min(ahead * RESERVE // (RESERVE - 1), self.queued_tokens)
        return self.cost.prompt_s(ahead, 0, self.chunk_tokens)

    @property
    def full_chunk(self) -> int:
        """Tokens of a step at the beginning of a prompt, as `plan` bounds it."""
        limit = self.chunk_tokens
        while limit > self.batch_tokens and self.cost.predict([(0, limit)]) > self.step_s:
            limit = max(limit // 2, self.batch_tokens)
        return limit

    def _keep_turns(self) -> None:
        self.turns.keep(p.tenant for p in itertools.chain(self.running, self.waiting))

    def _ready(self) -> list[Prompt]:
        """Whoever holds pages and can compute, oldest first."""
        ready = [p for p in self.running if p.state is State.RUNNING and p.remaining and not p.dropped]
        return sorted(ready, key=lambda p: p.number)

    def _pressing(self, prompts: list[Prompt]) -> list[Prompt]:
        if all(prompt.wanted_by == math.inf for prompt in prompts):
            return []

        def rest_s(prompt: Prompt) -> float:
            return self.cost.prompt_s(prompt.remaining, prompt.done, self.chunk_tokens)

        return pressing(prompts, self.clock(), rest_s, self.cost.predict([(0, self.chunk_tokens)]))

    def _next_to_admit(self) -> Prompt | None:
        """A prompt of the queue that has a part of the next step; it has its pages now."""
        lacking = [p for p in self.waiting if p.passed > PASSES * len(p.ids)]
        candidates = lacking[:1] or self.waiting
        while candidates := [p for p in candidates if p.lacked_at != self.blocks.changes]:
            prompts = sorted((*self._ready(), *candidates), key=lambda p: p.number)
            first = self._pressing(prompts)
            shares = share_out(prompts, self.turns, self.chunk_tokens, self.batch_tokens, first)
            new = [prompts[index] for index in shares.chosen if prompts[index].state is State.QUEUED]
            if not new:
                return None
            if self._lease_pages(new[0]):
                return new[0]
        return None

    def _lease_pages(self, prompt: Prompt) -> bool:
        """Takes the cached prefix and fresh pages for the rest, or nothing."""
        if prompt.lacked_at == self.blocks.changes:
            return False
        # The last token is always computed: its logits are what decode samples from.
        shared, cached = self.blocks.match(prompt.prefix, len(prompt.ids) - 1)
        fresh = -(-len(prompt.ids) // self.page_size) - len(shared)
        if fresh > self.blocks.available_beside(shared):
            prompt.lacked_at = self.blocks.changes
            return False
        self.blocks.retain(prompt.owner, shared)
        shared += self.blocks.allocate(prompt.owner, fresh)
        prompt.pages, prompt.cached, prompt.done = shared, cached, cached
        return True

    @staticmethod
    def _chunk(prompt: Prompt, tokens: int) -> Chunk:
        end = prompt.done + tokens
        last = end == len(prompt.ids)
        return Chunk(
            key=prompt.owner,
            ids=prompt.ids[prompt.done : end],
            start=prompt.done,
            pages=prompt.pages,
            logits="last" if last else "none",
            adapter=prompt.adapter,
        )


def _spans(prompts: list[Prompt], shares: Shares) -> list[Span]:
    return [(prompts[index].done, shares.of(index)) for index in shares.chosen]
