"""What `benchmarks.engine` measures: cases as data, and the seeded prompts they run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pdserve.engine.ledger import Step


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens each; `steps` decode steps a round, or 0 to time the prefill."""

    name: str
    lengths: tuple[int, ...]
    steps: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def timed_tokens(self) -> int:
        """Of one round."""
        return self.batch * self.steps if self.steps else sum(self.lengths)

    def prompts(self, vocab: int) -> list[tuple[int, ...]]:
        seeded = random.Random(sum(self.lengths))
        return [tuple(seeded.randrange(vocab) for _ in range(length)) for length in self.lengths]

    def step(self, rounds: int) -> Step:
        """The step in the middle of all rounds, for the ledger. Equal lengths only."""
        if not self.steps:
            return Step(self.batch, self.lengths[0])
        return Step(self.batch, 1, self.lengths[0] + rounds * self.steps // 2)


@dataclass(frozen=True)
class Cases:
    decode: tuple[Case, ...]
    prefill: tuple[Case, ...]
    ragged: tuple[Case, Case]
    """Mixed lengths, and equal ones with the same sum."""

    @property
    def most_tokens(self) -> int:
        """Of one sequence, output included."""
        return max(max(case.lengths) for case in self.all) + MARGIN

    @property
    def all(self) -> tuple[Case, ...]:
        return (*self.decode, *self.prefill, *self.ragged)


MARGIN = 512  # tokens that a sequence may grow over all rounds of a case

MIXED = (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1920, 2048)
EQUAL = (sum(MIXED) // len(MIXED),) * len(MIXED)

FULL = Cases(
    decode=(
        Case("decode, batch 1 after 512 tokens", (512,), 32),
        Case("decode, batch 1 after 2048 tokens", (2048,), 32),
        Case("decode, batch 8 after 512 tokens", (512,) * 8, 16),
        Case("decode, batch 32 after 128 tokens", (128,) * 32, 8),
    ),
    prefill=(Case("prefill, 512 tokens", (512,)), Case("prefill, 2048 tokens", (2048,))),
    ragged=(
        Case(f"decode, 16 sequences of 64 to 2048 tokens, {sum(MIXED)} in all", MIXED, 8),
        Case(f"decode, 16 sequences of {EQUAL[0]} tokens", EQUAL, 8),
    ),
)
QUICK = Cases(
    decode=(
        Case("decode, batch 1 after 32 tokens", (32,), 4),
        Case("decode, batch 8 after 32 tokens", (32,) * 8, 4),
    ),
    prefill=(Case("prefill, 64 tokens", (64,)),),
    ragged=(Case("decode, 4 sequences of 8 to 56 tokens", (8, 24, 40, 56), 2), Case("decode, 4 of 32", (32,) * 4, 2)),
)
