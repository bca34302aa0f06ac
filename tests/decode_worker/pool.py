"""A pool of pages with a model that is no engine: for tests of who gets pages and who loses them."""

from __future__ import annotations

from collections.abc import Sequence as Series
from typing import Any

from decode_worker.memory import Memory
from decode_worker.sampling import Choice
from decode_worker.sequence import FirstLogits, Sequence, State
from decode_worker.step import DecodeOutput
from pdserve.engine.plan import StepCounters
from tests.decode_worker.test_scheduler import Bench

PAGE = 4


class Pool(Bench):
    """A bench that also keeps what each page would hold, and checks it whenever a step reads it.

    The model is a function of all tokens so far, so that a wrong page or a lost token changes the output.
    """

    def __init__(self, pages: int, **settings: Any) -> None:
        super().__init__(pages, **settings)
        self.slots: dict[tuple[int, int], object] = {}
        self.refused = 0
        self.woken = False  # since the last plan began

    @staticmethod
    def model(tokens: Series[int], choice: int = 0) -> int:
        return (3 * sum(tokens) + 5 * tokens[-1] + len(tokens) + choice) % 7

    def expected(self, ids: tuple[int, ...], output: int, choice: int = 0) -> list[int]:
        tokens = list(ids)
        for _ in range(output):
            tokens.append(self.model(tokens, choice))
        return tokens[len(ids) :]

    def start(self, key: str, ids: tuple[int, ...], output: int, tenant: str = "t") -> Sequence:
        """One that runs already."""
        sequence = self.sequence(key, ids, output, tenant)
        self.open(sequence)
        assert sequence.state is State.GRANTED
        self.verify(sequence)
        return sequence

    def verify(self, sequence: Sequence) -> None:
        """The cache arrives: what is held is checked, the rest is written."""
        if not sequence.logits_only:
            self.check(sequence, sequence.cached, sequence.pages)
            self.write(sequence, sequence.cached, len(sequence.ids), sequence.pages)
        super().verify(sequence)

    def write(self, sequence: Sequence, start: int, end: int, pages: Series[int]) -> None:
        for at in range(start, end):
            self.slots[pages[at // PAGE], at % PAGE] = (sequence.request.tenant, sequence.tokens(0, at + 1))

    def check(self, sequence: Sequence, end: int, pages: Series[int]) -> None:
        for at in range(end):
            assert self.slots[pages[at // PAGE], at % PAGE] == (sequence.request.tenant, sequence.tokens(0, at + 1))

    def step(self) -> list[str]:
        """One step of the model; returns the keys of those that got a token."""
        scheduler = self.scheduler
        self.woken = False
        plan = scheduler.plan()
        if not plan.size and not self.woken:
            assert not scheduler.plan().size  # the loop sleeps now: whoever could run would not be asked again
        known = {s.key: s for s in scheduler.running}
        written: set[int] = set()
        for source, target in plan.copies:
            self.slots |= {(target, n): self.slots[source, n] for n in range(PAGE) if (source, n) in self.slots}
        for chunk in plan.step.chunks:
            sequence, end = known[chunk.key], chunk.start + len(chunk.ids)
            assert chunk.ids == sequence.tokens(chunk.start, end) and len(chunk.pages) * PAGE >= end
            own = set(chunk.pages[chunk.start // PAGE :])
            assert not own & written  # two sequences never write one page
            held = [s for s in known.values() if s is not sequence and own & set(s.pages)]
            assert not held, f"{chunk.key} writes in pages of {held[0].key}"
            written |= own
            self.check(sequence, chunk.start, chunk.pages)
            self.write(sequence, chunk.start, end, chunk.pages)
        chosen = {
            key: Choice(self.model(known[key].tokens(0, known[key].length), known[key].generation.choice))
            for key in plan.samplers
        }
        kept = {key: FirstLogits("fp32", b"") for key in plan.kept}
        scheduler.apply(plan, DecodeOutput(chosen, StepCounters(), kept))
        self.blocks.check_integrity()
        return list(plan.samplers)

    def wake(self) -> None:
        """A prompt that is computed here may begin."""
        self.woken = True

    def read(self, *sequences: Sequence) -> None:
        """Their readers catch up."""
        for sequence in sequences or tuple(self.scheduler.running):
            sequence.stream._unread, sequence.stream.full_since = 0, None

    def finish(self) -> None:
        """Everybody reads until all are done; a stall fails."""
        for _ in range(2000):
            if not self.scheduler.running:
                return
            self.read()
            self.step()
        raise AssertionError(f"stalled: {self.scheduler.running}")


def memory(pool: Bench) -> Memory:
    return pool.scheduler._memory


def forget_cached(pool: Bench) -> None:
    """Evicts whatever nobody holds."""
    pool.blocks.allocate("x", pool.blocks.available_count)
    pool.blocks.release("x")


def grown_until_stuck(pool: Pool, sequence: Sequence) -> None:
    while not memory(pool).stuck:
        pool.read()
        pool.step()
    assert pool.blocks.available_count == 0 and sequence.pages and sequence.state is State.DECODING
