"""Which prompt computes next, and who holds which pages. Plans only: no torch, no I/O, no clock of its own.

The life of one prompt:

    submit()        admit()             commit(): logits are sound   release(RELEASED): decode acknowledged
      |  QUEUED ------> RUNNING -----------------> COMMITTED -----------------> RELEASED
      |    |              |                            |
      |    |              +--------------+-------------+---> EXPIRED   lease or deadline over
      |    |                             |             +---> REFUSED   decode refused the handoff
      |    +---> EXPIRED, ABORTED        |             +---> ABORTED   the caller cancelled, or the worker drains
      +--------> REFUSED (queue full)    |             +---> FAILED    engine or transfer fault
                                         +--------------> (the same four exits)

A queued prompt holds no pages. `admit` gives it all pages of its prompt at once, under a lease;
`release` returns them; its caller sees to it that no step writes them and no sender reads them.

Queues:
    waiting   producer: the RPC handlers (submit); consumer: the worker's loop (admit); bound: max_queue prompts
    running   producer: admit; consumer: the worker's loop (plan, release); bound: max_running prompts,
              counted until their pages return, so a slow decode worker holds the queue back, not memory
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.engine.blocks import BlockManager, Prefix
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.errors import Exhausted


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
    state: State = State.QUEUED
    pages: tuple[int, ...] = ()
    cached: int = 0  # tokens found in the prefix index
    done: int = 0  # tokens [0, done) are in the pages
    chunks: int = 0  # engine steps it took so far
    lacked_at: int = -1  # `BlockManager.changes` when its pages last did not fit
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
        chunk_tokens: tokens of one step, over all its prompts.
        max_queue: prompts that may wait.
        max_running: prompts that may hold pages; at most chunk_tokens / 2.
        lease_s: seconds a prompt may hold pages.
    """

    blocks: BlockManager
    page_size: int
    chunk_tokens: int
    max_queue: int
    max_running: int
    lease_s: float
    waiting: list[Prompt] = field(default_factory=list)
    running: list[Prompt] = field(default_factory=list)

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
        self.waiting.append(prompt)

    def admit(self, now: float) -> list[Prompt]:
        """Takes prompts off the queue, in order, while their pages fit. The first that does not fit waits."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running and self._lease_pages(self.waiting[0]):
            prompt = self.waiting.pop(0)
            prompt.state = State.RUNNING
            prompt.deadline = min(prompt.deadline, now + self.lease_s)
            self.running.append(prompt)
            admitted.append(prompt)
        return admitted

    def plan(self) -> tuple[StepPlan, list[Prompt]]:
        """The next step and the prompts in it; both empty when nothing can compute.

        The oldest prompt has half of the step for itself, the others share the rest equally,
        shortest first; what one leaves over goes to the next, and at last to the oldest. So
        a long prompt delays a short one by a bounded factor, and is itself never starved.
        """
        ready = [p for p in self.running if p.state is State.RUNNING and p.remaining and not p.dropped]
        if not ready:
            return StepPlan(()), []
        oldest, others = ready[0], sorted(ready[1:], key=lambda p: p.remaining)
        reserved = min(oldest.remaining, self.chunk_tokens // 2)
        takes: list[tuple[Prompt, int]] = []
        budget = self.chunk_tokens - reserved
        for index, prompt in enumerate(others):
            take = min(prompt.remaining, budget // (len(others) - index))
            budget -= take
            takes.append((prompt, take))
        takes.insert(0, (oldest, min(oldest.remaining, reserved + budget)))
        chosen = [(prompt, take) for prompt, take in takes if take]
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

    def _lease_pages(self, prompt: Prompt) -> bool:
        """Takes the cached prefix and fresh pages for the rest, or nothing."""
        if prompt.lacked_at == self.blocks.changes:
            return False
        # The last token is always computed: its logits are what decode samples from.
        shared, cached = self.blocks.match(prompt.prefix, len(prompt.ids) - 1)
        need = -(-len(prompt.ids) // self.page_size)
        if shared:
            self.blocks.retain(prompt.owner, shared)
        try:
            fresh = self.blocks.allocate(prompt.owner, need - len(shared))
        except Exhausted:
            self.blocks.release(prompt.owner)
            prompt.lacked_at = self.blocks.changes
            return False
        prompt.pages, prompt.cached, prompt.done = (*shared, *fresh), cached, cached
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
        )
