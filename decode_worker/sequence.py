"""One request on the decode side, and the states it goes through.

    submit()    pages granted    first frame   all verified    first token   last token
      |  WAITING ------> GRANTED -----> RECEIVING ----> VERIFIED -----> DECODING -----> DONE
      |    | |^            |              |  |            |  ^            |  ^
      |    | |+------------+--------------+  |            v  |            v  |
      |    | | attempt over: pages go back,  |           PREEMPTED: no page; back to where it was
      |    | | a retry gets a new ticket     |           once it has pages again, then recomputes
      |    | |                               |              v  ^
      |    | +- pages, no handoff: its prompt is computed - PREFILLING --- first token --> DECODING
      |    v                                 v
      |  EXPIRED  ticket, receipt, reader or the whole request took too long
      |  ABORTED  the caller closed the stream, or the worker drains          from every state
      |  FAILED   engine or sampler fault
      +> REFUSED  never waited: invalid, incompatible, queue full

A request that wants one token goes from WAITING to VERIFIED with logits only and no page, unless its
prompt is computed here. That (`here`) is what its caller asked for, or asks for instead of another attempt.

A handoff may bring the beginning of a prompt only. Once that is verified the sequence is PREFILLING, and
computes the rest; with a tail (tail.py) it began with that while the handoff arrived, and is VERIFIED once it is done.

A request for several outputs has one sequence that brings the cache of the prompt, from a handoff or computed here.
Once it is complete that one is FORKED: its choices, which have waited in no queue, begin at VERIFIED. They hold the
pages together, and copy the last one before they write there; from then on each goes its own way.

A sequence that was preempted keeps its stream, sampler, text and stop state, and the first
logits if no token was sampled from them. What its pages held is found in the prefix index or
computed again: while more than one of its tokens is not cached, it recomputes.

Who holds its pages, by owner name in the BlockManager:
    <key>        from the grant to the end of the attempt or of the sequence, or to preemption; of a prompt
                 that is computed here, with the prefix found then
    <key>/pin    the prefix this worker already held, from admission to the end, or to preemption
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from cache_transfer.contract import HandoffIdentity
from decode_worker.admission import DecodeRequest
from decode_worker.generation import Generation
from decode_worker.stream import EventStream
from pdserve.engine.prefix import Prefix
from pdserve.errors import Internal, PdserveError
from pdserve.rpc.events import Finish
from pdserve.telemetry.context import Scope, current
from pdserve.telemetry.logs import about

if TYPE_CHECKING:
    from decode_worker.tail import Tail

log = logging.getLogger(__name__)


class State(StrEnum):
    WAITING = "waiting"
    GRANTED = "granted"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    DONE = "done"
    FORKED = "forked"
    REFUSED = "refused"
    EXPIRED = "expired"
    ABORTED = "aborted"
    FAILED = "failed"


EXITS = frozenset({State.DONE, State.FORKED, State.REFUSED, State.EXPIRED, State.ABORTED, State.FAILED})
HANDOFF = frozenset({State.WAITING, State.GRANTED, State.RECEIVING})  # the cache is not complete yet
RUNNING = frozenset({State.VERIFIED, State.PREFILLING, State.DECODING, State.PREEMPTED})

_FAULTS = frozenset({State.EXPIRED, State.ABORTED, State.FAILED})
_NEXT = {
    State.WAITING: frozenset({State.GRANTED, State.VERIFIED, State.PREFILLING, State.REFUSED, State.DONE}) | _FAULTS,
    State.GRANTED: frozenset({State.WAITING, State.RECEIVING, State.VERIFIED, State.PREFILLING}) | _FAULTS,
    State.RECEIVING: frozenset({State.WAITING, State.VERIFIED, State.PREFILLING}) | _FAULTS,
    State.VERIFIED: frozenset({State.DECODING, State.FORKED, State.PREEMPTED, State.DONE}) | _FAULTS,
    State.PREFILLING: frozenset({State.VERIFIED, State.DECODING, State.FORKED, State.PREEMPTED, State.DONE}) | _FAULTS,
    State.DECODING: frozenset({State.PREEMPTED, State.DONE}) | _FAULTS,
    State.PREEMPTED: frozenset({State.VERIFIED, State.PREFILLING, State.DECODING}) | _FAULTS,
}


@dataclass(frozen=True)
class FirstLogits:
    """Raw scores of the next token, as they came with the handoff."""

    dtype: str  # fp32 | float64
    data: bytes  # [vocab], little endian


@dataclass
class Work:
    """What the prompt of a sequence cost that computes it here. Times are monotonic seconds, 0: not yet."""

    asked_at: float = 0.0
    began_at: float = 0.0  # its first chunk
    computed: int = 0  # tokens
    found: int = 0  # tokens, in the prefix index
    chunks: int = 0


@dataclass(eq=False)
class Sequence:
    """Event loop only. The scheduler owns pages and `cached`, the worker the handoff's fields."""

    key: str  # unique in this worker
    request: DecodeRequest
    generation: Generation
    stream: EventStream
    prefix: Prefix  # its full pages, as other sequences may find them
    cache_tokens: int  # largest cache it will need; 0: logits only
    ends_at: float = math.inf  # monotonic seconds: the caller's deadline, or the worker's bound
    arrives_by: float = math.inf  # when its cache must be complete, whatever the number of attempts
    wanted_by: float = math.inf  # an objective for its first token, of a prompt that is computed here
    deadline: float = math.inf  # of the present step of the handoff, never after the two above
    state: State = State.WAITING
    handoff_id: bytes = b""
    attempts: int = 0  # tickets issued for it
    identity: HandoffIdentity | None = None  # of the cache that must arrive
    held: tuple[int, ...] = ()  # pinned pages of the prefix this worker already had
    pages: tuple[int, ...] = ()  # block table: held or found again, then its own
    cached: int = 0  # tokens [0, cached) are in the pages
    first: FirstLogits | None = None  # until the first token was sampled
    choices: tuple[Sequence, ...] = ()  # several outputs that begin on its cache; then it only brings that, and forks
    replayed: tuple[Finish, ...] = ()  # of choices that are complete already: told when the others begin
    origin: Sequence | None = None  # whose choice this is
    shared_pages: int = 0  # that it began on together with the other choices
    copied_pages: int = 0  # of these
    leaving: tuple[int, ...] = ()  # pages that the step which runs copies from; no longer in `pages`
    stepping: bool = False  # part of the step that runs now
    ending: tuple[State, PdserveError] | None = None  # told to end; waits for step or writers
    attempt_error: PdserveError | None = None  # why the last attempt failed, if it did
    here: bool = False  # no handoff: its prompt is computed here
    prefilling: bool = False  # and is not yet, as far as its first token
    tail: Tail | None = None  # the end of a split prompt, while it is computed layer by layer
    reached: int = 0  # tokens that were cached before it was last preempted
    work: Work = field(default_factory=Work)
    verified_at: float = 0.0  # monotonic seconds: its cache had come whole
    started_at: float = 0.0  # the same: its first token was sampled here
    scope: Scope = field(default_factory=current)  # for log lines of tasks that are not its call's

    @property
    def logits_only(self) -> bool:
        return self.cache_tokens == 0

    def allow(self, seconds: float, now: float) -> None:
        """Sets the deadline of the next step of the handoff."""
        self.deadline = min(now + seconds, self.arrives_by, self.ends_at)

    @property
    def ids(self) -> tuple[int, ...]:
        """What the handoff brings: the prompt, then the output of earlier workers."""
        return self.request.ids

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far; the last one sampled is not cached yet."""
        return len(self.request.prompt_ids) + len(self.generation.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of prompt and output so far."""
        prompt, output = self.request.prompt_ids, self.generation.output
        own = len(prompt)
        return (*prompt[start:end], *output[max(0, start - own) : max(0, end - own)])

    @property
    def remaining(self) -> int:
        """Tokens that are not cached: 1 while it decodes, more while it computes its prompt or what it lost."""
        return self.length - self.cached

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def awaits_handoff(self) -> bool:
        """Somebody may write its cache, or will."""
        return self.state in HANDOFF and not self.here

    @property
    def ready(self) -> bool:
        """Its reader keeps up, and nobody has ended it."""
        return self.ending is None and self.stream.full_since is None

    @property
    def pin(self) -> str:
        """Owner name of the pinned prefix."""
        return f"{self.key}/pin"

    def move(self, state: State) -> None:
        """Raises Internal for a step that the drawing above does not have."""
        if state not in _NEXT.get(self.state, frozenset()):
            raise Internal(f"{self.key} cannot go from {self.state} to {state}", reason="SEQUENCE_STATE")
        log.debug("%s: %s -> %s", self.key, self.state, state, extra=about(self.scope))
        self.state = state
        if state is State.DECODING:
            self.started_at = self.started_at or time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """How a sequence left the worker, for logs and tests."""

    key: str
    state: State
    error: PdserveError | None = field(default=None, compare=False)
