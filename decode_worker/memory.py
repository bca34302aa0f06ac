"""Which sequences have pages. Bookkeeping only, for the scheduler; no torch, no clock.

A sequence that runs gets a page just before the step that needs it. When none is left the
youngest one is preempted: it loses its pages, and takes them back later, oldest first, to
compute again what they held. The victim is never the oldest of those that can compute, and
every request fits the pool alone, so somebody always goes on.

Whoever wants pages without running yet (a grant, a preempted sequence) must leave
`growth_watermark` of the pool for the growth of those that run. A cache in transfer counts with
what it holds, in which its first growth is included. The watermark does not apply when nobody
holds pages, so that nothing waits for ever.

The outputs of one prompt begin on the same pages and hold all of them. A page is written by a sequence that holds it
alone; the only one that several still have to write in is the prompt's last, which each but the last copies first.

Pinned prefixes of waiting requests cannot be taken back. They are at most half of the pool, they
expire, and none is added while a sequence lacks pages, or if a request that waits would no longer
fit beside them. Where nothing but pins is in the way of a sequence, it steps back until the
others have had their turn.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from decode_worker.sequence import RUNNING, Sequence, State
from pdserve.engine.blocks import BlockManager
from pdserve.telemetry.logs import about

log = logging.getLogger(__name__)


@dataclass
class MemoryCounters:
    """What became of pages since the start."""

    preemptions: int = 0  # how often a sequence lost them
    forks: int = 0  # sequences that began on pages which they share
    shared_pages: int = 0  # these, counted for each
    copied_pages: int = 0  # of these, copied before one of several wrote there


@dataclass
class Memory:
    """Owned by the scheduler; changes `pages`, `held`, `cached` and the prefix of its sequences.

    Args:
        waiting, running: the scheduler's own lists; `running` is oldest first.
        growth_watermark: share of the pool, rounded up to pages.
    """

    blocks: BlockManager
    waiting: list[Sequence]
    running: list[Sequence]
    growth_watermark: float
    counters: MemoryCounters = field(default_factory=MemoryCounters)
    stuck: bool = False  # in the last plan a sequence could not grow
    _copies: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (who, from, to) in the next step

    # -- before the cache is here ------------------------------------------------------------

    def pin(self, sequence: Sequence) -> None:
        """Pins the prefix that is here already, if there may be one more pin. All but the last token of the handoff at
        most: a handoff brings something, or the logits of the last one.
        """
        if self.lacking:
            return
        pages, tokens = self.blocks.match(sequence.prefix, sequence.request.handoff_end - 1)
        ungranted = [s for s in self.waiting if not s.pages]
        pinned = len({page for s in ungranted for page in s.held}.union(pages))
        largest = max((self._missing(s, s.held) for s in ungranted), default=0)
        largest = max(largest, self._missing(sequence, pages))
        if pinned <= self.blocks.pages // 2 and pinned + largest <= self.blocks.pages:
            self.blocks.retain(sequence.pin, pages)
            sequence.held, sequence.cached = pages, tokens

    @property
    def lacking(self) -> bool:
        """A sequence that runs could go on if it had pages: nobody new gets any."""
        return self.stuck or bool(self._preempted())

    @property
    def alone(self) -> bool:
        """Nobody holds pages, pinned prefixes aside."""
        return not any(s.pages for s in self.waiting) and not any(s.pages for s in self.running)

    def grant(self, sequence: Sequence) -> bool:
        """Pages for what arrives and its first growth; False, with nothing changed, if they do not fit.

        A prompt that is computed here takes what the prefix index has of it.
        """
        if sequence.here:
            if not self._claim(sequence):
                return False
            sequence.work.found = sequence.cached
            return True
        fresh = self._missing(sequence, sequence.held)
        if not self._fits(self.blocks.available_count - fresh - self._growth_of_choices(sequence)):
            return False
        sequence.pages = (*sequence.held, *self.blocks.allocate(sequence.key, fresh))
        return True

    # -- while it runs -----------------------------------------------------------------------

    def fork(self, sequence: Sequence) -> None:
        """Its choices take over its pages, all of them each; it holds none any more."""
        pages = sequence.pages[: self.blocks.pages_for(sequence.cached)]
        several = len(sequence.choices) > 1
        for choice in sequence.choices:
            self.blocks.retain(choice.key, pages)
            choice.pages, choice.cached, choice.cache_tokens = pages, sequence.cached, sequence.cache_tokens
            choice.first = None if choice.generation.output else sequence.first
            choice.shared_pages = len(pages) if several else 0
            self.counters.forks += several
            self.counters.shared_pages += choice.shared_pages
        self.release(sequence)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Sees to it that it has pages for `tokens` tokens, and alone holds those that it is to write, at others' cost
        if need be; False: not now.
        """
        while self._missing_to(sequence, tokens) > self.blocks.available_count:
            victim = self._victim(sequence)
            if victim is None:
                if not any(s.pages for s in (*self.waiting, *self.running) if s is not sequence):
                    self.preempt(sequence)  # only pins are in the way: others go first
                return False
            self.preempt(victim)
        if self._shares_end(sequence):
            self._copy_end(sequence)
        if (missing := self.blocks.pages_for(tokens) - len(sequence.pages)) > 0:
            sequence.pages += self.blocks.allocate(sequence.key, missing)
        return True

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Pages (from, to) that the step which is planned copies before all else."""
        return tuple((source, target) for _, source, target in self._copies)

    def copied(self) -> None:
        """That step is over: what it copied from is no longer held for it."""
        for sequence, source, _ in self._copies:
            self.blocks.drop(sequence.key, source)
            sequence.leaving = ()
        self._copies.clear()

    def _missing_to(self, sequence: Sequence, tokens: int) -> int:
        return self.blocks.pages_for(tokens) - len(sequence.pages) + self._shares_end(sequence)

    def _shares_end(self, sequence: Sequence) -> bool:
        """Others still read the page in which its next token goes. Whoever copies from it in this step does not count:
        that comes first.
        """
        at, used = divmod(sequence.cached, self.blocks.page_size)
        if not used or at >= len(sequence.pages):
            return False
        page = sequence.pages[at]
        copying = sum(source == page for _, source, _ in self._copies)
        return self.blocks.references(page) - copying > 1

    def _copy_end(self, sequence: Sequence) -> None:
        at = sequence.cached // self.blocks.page_size
        source, (target,) = sequence.pages[at], self.blocks.allocate(sequence.key, 1)
        sequence.pages = (*sequence.pages[:at], target, *sequence.pages[at + 1 :])
        sequence.leaving = (source,)
        sequence.copied_pages += 1
        self._copies.append((sequence, source, target))
        self.counters.copied_pages += 1

    def preempt(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence that no step writes; the full ones stay findable until they are needed."""
        log.info("%s: preempted, %d tokens were cached", sequence.key, sequence.cached, extra=about(sequence.scope))
        self.publish(sequence)
        self.release(sequence)
        sequence.tail = None
        sequence.reached, sequence.cached = max(sequence.reached, sequence.cached), 0
        sequence.move(State.PREEMPTED)
        self.counters.preemptions += 1

    def resume(self) -> bool:
        """Gives preempted sequences their pages back, oldest first; False: none. One that does not fit holds the
        others back, unless only pinned prefixes are in its way.
        """
        resumed = False
        for sequence in self._preempted():
            if self._take_back(sequence):
                resumed = True
            elif not self.alone:
                break
        return resumed

    def publish(self, sequence: Sequence) -> None:
        """Full pages of verified content only: the handoff's tokens, then what was decoded."""
        if sequence.pages and sequence.state in RUNNING:
            sequence.prefix.extend(sequence.tokens(len(sequence.prefix), sequence.length))
            self.blocks.publish(sequence.prefix, sequence.pages[: sequence.cached // self.blocks.page_size])

    def release(self, sequence: Sequence) -> None:
        """Everything it holds goes back. Nothing writes there any more."""
        self.blocks.release(sequence.key)
        self.blocks.release(sequence.pin)
        sequence.pages = sequence.held = ()

    def _preempted(self) -> list[Sequence]:
        """Those that would go on if they had pages."""
        return [s for s in self.running if s.state is State.PREEMPTED and s.ready]

    def _take_back(self, sequence: Sequence) -> bool:
        """Its pages again, and back to where it was; False, with nothing changed: no room."""
        if not self._claim(sequence):
            return False
        if sequence.first is not None:
            sequence.move(State.VERIFIED)
        else:
            sequence.move(State.PREFILLING if sequence.prefilling else State.DECODING)
        return True

    def _claim(self, sequence: Sequence) -> bool:
        """Finds what is left of its cache and takes room for the rest; False, with nothing changed: no room."""
        # Without first logits those of its last token must be computed.
        limit = sequence.length - (sequence.first is None)
        found, tokens = self.blocks.match(sequence.prefix, limit)
        fresh = self._missing(sequence, found)
        if not self._fits(self.blocks.available_beside(found) - fresh):
            return False
        self.blocks.retain(sequence.key, found)
        sequence.pages = (*found, *self.blocks.allocate(sequence.key, fresh))
        sequence.cached = tokens
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest that is younger than `sequence`, or else the youngest whose reader does not keep up."""
        at = self.running.index(sequence)
        older, younger = self.running[:at], self.running[at + 1 :]
        paused = [s for s in older if not s.ready]
        return next((s for s in (*reversed(younger), *reversed(paused)) if s.pages and not s.stepping), None)

    def _missing(self, sequence: Sequence, found: tuple[int, ...]) -> int:
        """Pages for its tokens so far and the first growth after them, besides those found."""
        return self.blocks.pages_for(min(sequence.length + 1, sequence.cache_tokens)) - len(found)

    def _growth_of_choices(self, sequence: Sequence) -> int:
        """Pages that the outputs of one prompt soon need besides those it is granted; they take them as they grow.
        One that is alone can do without: its outputs wait for each other.
        """
        if not sequence.choices or self.alone:
            return 0
        soon = self.blocks.pages_for(min(sequence.length + 1, sequence.cache_tokens))
        return (len(sequence.choices) - 1) * (soon - sequence.length // self.blocks.page_size)

    def _fits(self, left: int) -> bool:
        """Whether `left` available pages are enough for the growth of everybody else."""
        return left >= (0 if self.alone else math.ceil(self.growth_watermark * self.blocks.pages))
