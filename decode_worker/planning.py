"""What is in the next step: the tokens of the streams, then what is computed again, then layers of the end of a split
prompt, or parts of prompts. Takes their pages.

Tokens whose logits have come with a handoff go before all that, in a step of their own: sampling them takes a
millisecond, and in a step with others they would wait for the whole model.

Plans only, for the scheduler: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from decode_worker.memory import Memory
from decode_worker.prompts import Prompts
from decode_worker.sequence import Sequence, State
from decode_worker.step import DecodePlan
from decode_worker.tail import Tail
from pdserve.engine.order import RESERVE
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.rate import Span


@dataclass
class Planner:
    """See the module's docstring.

    Args:
        waiting, running: the scheduler's own lists, oldest first.
        max_batch: sequences of one step, prompts not counted.
        recompute_tokens: tokens that one step may compute again, over all sequences.
    """

    memory: Memory
    waiting: list[Sequence]
    running: list[Sequence]
    prompts: Prompts
    max_batch: int
    recompute_tokens: int
    tail: Tail | None = None
    """Of the step that runs; the scheduler takes it away after that."""
    _contended: int = 0  # steps that both tails and prompts wanted

    def plan(self) -> DecodePlan:
        """The oldest sequences whose readers keep up and that have pages; may be empty. They are `stepping` then."""
        memory = self.memory
        memory.resume()
        memory.stuck = False
        takes: dict[Sequence, int] = {}  # tokens of the chunk; 0: its logits are here
        self._take_firsts(takes)
        tail, layers = None, 0
        if not takes:
            self._take_streams(takes)
            tail, layers = self._take_tail(takes)
            if tail is None:
                self._take_prompts(takes)
        if not takes and tail is None and memory.resume():
            return self.plan()  # one that stepped back found what it needs among the pins
        chunks = {sequence.key: self._chunk(sequence, take) for sequence, take in takes.items() if take}
        chosen = [s for s in takes if s.key not in chunks or chunks[s.key].logits == "last"]
        return DecodePlan(
            step=StepPlan(tuple(chunks.values())),
            first={s.key: s.first for s in takes if s.first is not None},
            samplers={s.key: s.generation.sampler for s in chosen if not s.choices},
            kept=frozenset(s.key for s in chosen if s.choices),
            copies=memory.copies,
            tail=tail,
            tail_layers=layers,
        )

    def _take_firsts(self, takes: dict[Sequence, int]) -> None:
        """Whoever needs no model for its next token, and would be in the next step anyhow."""
        for sequence in islice(self._decoding(), self.max_batch):
            if sequence.first is not None:
                takes[sequence] = 0
                sequence.stepping = True

    def _take_streams(self, takes: dict[Sequence, int]) -> None:
        """Whoever decodes, or computes again what it lost."""
        budget = self.recompute_tokens
        for sequence in self._decoding():
            if len(takes) == self.max_batch:
                return
            missing = sequence.remaining
            take = 1 if missing == 1 else min(missing, budget)
            if not take:
                continue  # others compute again in this step
            if not self._grown(sequence, take):
                continue
            budget -= take if missing > 1 else 0
            takes[sequence] = take
            sequence.stepping = True

    def _decoding(self) -> Iterator[Sequence]:
        """Oldest first."""
        for sequence in tuple(self.running):
            # One that an older sequence preempted just now is no longer what it was when the loop began.
            if sequence.ready and sequence.state not in (State.PREEMPTED, State.PREFILLING):
                yield sequence

    def _take_tail(self, takes: dict[Sequence, int]) -> tuple[Tail | None, int]:
        """The tail that has the rest of this step, and its layers in it; it holds its pages until the step is over.

        Shortest first, tails and prompts alike; but one of RESERVE steps is the others', so that none waits for ever.
        """
        tails = {
            s: s.tail for s in (*self.running, *self.waiting) if s.tail is not None and s.ready and s.tail.ready > 0
        }
        if not tails:
            return None, 0
        shortest_first = sorted(tails.items(), key=lambda item: item[1].remaining)
        if prompts := self._prompts():
            self._contended += 1
            shorter = all(shortest_first[0][1].remaining <= prompt.remaining for prompt in prompts)
            if shorter == (self._contended % RESERVE == 0):
                return None, 0
        beside, streams = _spans(takes), any(other.remaining == 1 for other in takes)
        for sequence, tail in shortest_first:
            if layers := self.prompts.layers(tail.span, tail.ready, beside, streams):
                self.memory.blocks.retain(tail.owner, tail.chunk.pages)
                self.tail = tail
                return tail, layers
            if sequence.prefilling:  # a layer takes too long beside streams: parts of the usual size, then
                sequence.tail = None
        return None, 0

    def _take_prompts(self, takes: dict[Sequence, int]) -> None:
        """Parts of prompts, beside what `takes` has."""
        beside = _spans(takes)
        streams = any(sequence.remaining == 1 for sequence in takes)
        for sequence, take in self.prompts.share(self._prompts(), beside, streams):
            # One of them may have lost its pages to another.
            if sequence.state is State.PREFILLING and self._grown(sequence, take):
                takes[sequence] = take
                sequence.stepping = True

    def _prompts(self) -> list[Sequence]:
        """Whose prompts, or ends of them, are computed in parts."""
        return [s for s in self.running if s.state is State.PREFILLING and s.ready and s.tail is None]

    def _grown(self, sequence: Sequence, take: int) -> bool:
        grown = self.memory.grow(sequence, sequence.cached + take)
        self.memory.stuck |= not grown
        return grown

    def _chunk(self, sequence: Sequence, take: int) -> Chunk:
        """The next tokens that are not cached: the last one sampled, or after preemption more than that."""
        end = sequence.cached + take
        return Chunk(
            key=sequence.key,
            ids=sequence.tokens(sequence.cached, end),
            start=sequence.cached,
            pages=sequence.pages[: self.memory.blocks.pages_for(end)],
            logits="last" if end == sequence.length else "none",
            adapter=sequence.request.adapter,
        )


def _spans(takes: Mapping[Sequence, int]) -> list[Span]:
    """What a step of these chunks has to compute."""
    return [(sequence.cached, take) for sequence, take in takes.items() if take]
