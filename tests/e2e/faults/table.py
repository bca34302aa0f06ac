"""What is broken, when, in whom, and what must come of it.

The expectations follow from the protocol, with two workers in each pool:

* A prefill worker holds nothing that another one cannot compute again.
* A decode worker holds nothing that the router does not have: prompt, options, and every token it passed on.
* The registry is only asked in the background.
* The router's own streams have nobody to move to: its death cuts them, and while it hangs they run into
  the client's deadline.
* A slow network is no fault of anybody: whoever is too late is replaced, and the answer comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Fault(StrEnum):
    DEATH = "death"  # SIGKILL; later a new process, on other ports
    HANG = "hang"  # SIGSTOP; later SIGCONT, if possible while another attempt is under way, to meet its fences
    RESTART = "restart"  # SIGKILL, and at once a new process on the same ports
    SLOW = "slow"  # its network moves a few kilobytes per second, until the answer has come


class Step(StrEnum):
    """Moments in the life of one request; each is reached once in an attempt."""

    ADMIT = "admit"  # decode has taken the request and is about to send the ticket
    OPEN = "open"  # the first message of the push
    GRANT = "grant"  # decode has given pages
    MID_FRAMES = "mid_frames"  # some frames of the cache have gone, some have not
    LOGITS = "logits"
    COMMIT = "commit"
    FIRST_TOKEN = "first_token"
    MID_STREAM = "mid_stream"  # some tokens have gone, some have not
    RELEASE = "release"  # decode: all tokens are out, not the finish; prefill: the acknowledgement is here


class Part(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    REDIS = "redis"


class Outcome(StrEnum):
    """What the client must see; in every case its tokens are the first ones of the one right answer."""

    COMPLETE = "complete"  # the whole answer
    LOST = "lost"  # Unavailable: its connection broke, or was cut
    DEADLINE = "deadline"  # DeadlineExceeded, its own


@dataclass(frozen=True)
class Cell:
    part: Part
    fault: Fault
    step: Step

    @property
    def name(self) -> str:
        return f"{self.part}-{self.fault}-{self.step}"

    @property
    def expected(self) -> Outcome:
        if self.part is not Part.ROUTER or self.fault is Fault.SLOW:
            return Outcome.COMPLETE
        return Outcome.DEADLINE if self.fault is Fault.HANG else Outcome.LOST

    @property
    def reporter(self) -> Part:
        """Who stands still at the step: the victim if the step is its own, else whoever makes it."""
        return self.part if self.step in _OWN[self.part] else _MADE_BY[self.step]

    @property
    def revived_at(self) -> Step | None:
        """When a worker that hangs goes on again: decode is here with the attempt that took its place.

        None: after the request, since nobody takes its place, or whoever does has nothing left to do.
        """
        if self.fault is not Fault.HANG:
            return None
        if self.part is Part.PREFILL and self.step in _PUSH:
            return Step.MID_FRAMES
        return Step.MID_STREAM if self.part is Part.DECODE and self.step is not Step.RELEASE else None

    @property
    def has_companion(self) -> bool:
        """Whether another request streams meanwhile. On a client's slow line it would hold up the one that counts."""
        return not (self.part is Part.ROUTER and self.fault is Fault.SLOW)


_MADE_BY = {
    Step.ADMIT: Part.DECODE,
    Step.OPEN: Part.PREFILL,
    Step.GRANT: Part.DECODE,
    Step.MID_FRAMES: Part.PREFILL,
    Step.LOGITS: Part.PREFILL,
    Step.COMMIT: Part.PREFILL,
    Step.FIRST_TOKEN: Part.DECODE,
    Step.MID_STREAM: Part.DECODE,
    Step.RELEASE: Part.DECODE,
}
_PUSH = frozenset({Step.OPEN, Step.GRANT, Step.MID_FRAMES, Step.LOGITS, Step.COMMIT})
_CALL = frozenset({Step.ADMIT, Step.FIRST_TOKEN, Step.MID_STREAM, Step.RELEASE})
_OWN = {
    Part.PREFILL: _PUSH | {Step.RELEASE},
    Part.DECODE: _PUSH | _CALL,
    Part.ROUTER: _CALL,
    Part.REDIS: frozenset[Step](),
}

# In this order the slow cells, which need an installation with relays, come last.
CELLS = tuple(Cell(part, fault, step) for fault, part, step in product(Fault, Part, Step))
