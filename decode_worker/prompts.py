"""Prompts that this worker computes itself: how many tokens of which in the next step. No torch.

Among prompts the order is that of the prefill workers (pdserve/engine/order.py): shortest remaining first, but for
those that an objective presses, with a quarter of each step for those who wait longest. How many tokens they get
together depends on who else computes: beside streams as many as let the step end within `step_s`, by what steps have
cost so far; without any, all that `chunk_tokens` allows. A step always has LEAST_TOKENS for prompts, or they would wait
for streams without end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdserve.engine.order import RESERVE, Turns, Waiter, pressing, share_out
from pdserve.engine.rate import TOLD_S, Span, StepCost

LEAST_TOKENS = 8
_BATCH_TOKENS = 64  # up to which a step of short prompts is filled with parts of others
_ONE_STREAM: Span = (512, 1)


class Prompt(Waiter, Protocol):
    @property
    def cached(self) -> int: ...


P = TypeVar("P", bound=Prompt)


@dataclass
class Prompts:
    """See the module's docstring. Owned by the scheduler.

    Args:
        chunk_tokens: tokens of one step at most, over all prompts.
        step_s: seconds that a step with streams in it should take at most; 0: no such limit.
    """

    chunk_tokens: int
    step_s: float
    cost: StepCost = field(default_factory=StepCost)
    """What steps take here now; whoever runs them tells it (`learn`)."""
    told: StepCost = field(default_factory=lambda: StepCost(TOLD_S))
    """The same, as others are told."""
    turns: Turns = field(default_factory=Turns)
    computed: int = 0  # tokens of prompts so far
    clock: Callable[[], float] = time.monotonic
    """Only asked for prompts with an objective."""

    def learn(self, spans: Sequence[Span], seconds: float) -> None:
        """A step of these chunks took so long."""
        self.cost.observe(spans, seconds)
        self.told.observe(spans, seconds)

    def share(self, prompts: Sequence[P], beside: Sequence[Span], streams: bool) -> list[tuple[P, int]]:
        """The next chunk of each prompt that gets one; takes their turns.

        Args:
            prompts: whoever can compute, oldest first.
            beside: what else is in the step.
            streams: some of that is a token that a reader waits for.
        """
        if not prompts:
            return []
        self.turns.keep(prompt.tenant for prompt in prompts)
        limit = self.limit(prompts, beside) if streams else self.chunk_tokens
        first = self._pressing(prompts, beside if streams else (), limit)
        shares = share_out(prompts, self.turns, limit, min(_BATCH_TOKENS, limit), first)
        self.turns.took((prompts[index].tenant, tokens) for index, tokens in shares.reserved.items())
        return [(prompts[index], shares.of(index)) for index in shares.chosen]

    def _pressing(self, prompts: Sequence[P], beside: Sequence[Span], limit: int) -> list[P]:
        if all(prompt.wanted_by == math.inf for prompt in prompts):
            return []
        others_s = self.cost.predict(beside) - self.cost.fixed_s if beside else 0.0  # in each step

        def rest_s(prompt: P) -> float:
            steps = -(-prompt.remaining // limit)
            return self.cost.prompt_s(prompt.remaining, prompt.cached, limit) + steps * others_s

        return pressing(prompts, self.clock(), rest_s, self.cost.predict([*beside, (0, limit)]))

    def limit(self, prompts: Sequence[Prompt], beside: Iterable[Span]) -> int:
        """Tokens of a step beside streams: the most that are expected to end within `step_s`."""
        if not self.step_s:
            return self.chunk_tokens
        least = min(LEAST_TOKENS, self.chunk_tokens)
        if not self.cost.known:
            return least
        left_s = self.step_s - self.cost.predict(beside)
        # The shortest one computes most of the step; its place in the prompt tells what a token costs.
        start = min(prompts, key=lambda p: p.remaining).cached if prompts else 0
        low, high = least, self.chunk_tokens
        while low < high:
            tokens = (low + high + 1) // 2
            if self.cost.predict([(start, tokens)]) - self.cost.fixed_s <= left_s:
                low = tokens
            else:
                high = tokens - 1
        return low

    def layers(self, span: Callable[[int], Span], ready: int, beside: Sequence[Span], streams: bool) -> int:
        """Layers of a split prompt's end in one step, as `limit`; 0 where a single one is expected to take too long.

        Args:
            span: what so many of its layers cost.
            ready: those that may run.
        """
        if not self.cost.known:
            return 1
        room_s = self.step_s - self.cost.predict(beside) if streams else self.cost.predict([(0, self.chunk_tokens)])
        if streams and not self.step_s:
            return ready
        fitting = [n for n in range(1, ready + 1) if self.cost.predict([span(n)]) - self.cost.fixed_s <= room_s]
        return fitting[-1] if fitting else 0 if streams else 1

    # -- what others are told ------------------------------------------------------------------

    def tokens_per_s(self) -> float:
        """Rate of a prompt that has the worker to itself; 0 while none was computed here."""
        return self.told.tokens_per_s(self.chunk_tokens) if self.computed else 0.0

    def shared_tokens_per_s(self, beside: Sequence[Span]) -> float:
        """Rate of a prompt beside streams that take these parts in each step, without any beside one, which may have
        come before this is read; 0 while none was computed here.
        """
        if not self.computed:
            return 0.0
        beside = beside or [_ONE_STREAM]
        tokens = self.limit((), beside)
        seconds = self.told.predict([*beside, (0, tokens)])
        return tokens / seconds if seconds > 0 else 0.0

    def wait_s(self, prompts: Iterable[Prompt], beside: Sequence[Span]) -> float:
        """Seconds before a prompt of `chunk_tokens` would begin that came now; 0 while none was computed here."""
        rate = self.shared_tokens_per_s(beside) if beside else self.tokens_per_s()
        tokens = [prompt.remaining for prompt in prompts]
        ahead = sum(count for count in tokens if count <= self.chunk_tokens)
        # Those who wait longest compute besides, as long as there are any.
        return min(ahead * RESERVE // (RESERVE - 1), sum(tokens)) / rate if rate else 0.0
