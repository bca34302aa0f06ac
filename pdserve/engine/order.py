"""Which prompts compute in the next step, and how many tokens of each. Pure functions and one small book.

*Shortest first.* A step belongs to the prompt with the fewest tokens left. A step so small that its fixed cost
would weigh is filled up with the next shortest ones, in whole or in part, to `batch_tokens` and no further: what
rides along makes those who are about to finish wait.

*Objective.* Where first tokens are wanted within a time (`wanted_by`), a prompt that can still make it and would not
after one more step of others goes before the shortest. One that is too late gains nothing by going first, and does not.

*Ageing.* Of every step a quarter (1 / RESERVE) is set aside, beyond what went to the shortest, for those who have
waited longest: the tenants in turn, each with its oldest prompt. Turns are counted in tokens: first comes the tenant
that got fewest, and a tenant that comes anew begins with those who got most, so that nobody gains by coming and going.

*The bound.* Let a prompt of n tokens arrive when its tenant has W tokens left to compute here, and let prompts of
at most k tenants be here at a time until it is done. However many other prompts arrive meanwhile, and however short,
this worker computes at most

    RESERVE * k * (W + n)  +  (k + 1) * (chunk_tokens + RESERVE)

tokens before the prompt is computed too, itself included, provided that it finds its pages (see scheduler.py).
For: each step of T tokens, whoever it belongs to, gives at least T / RESERVE to turns; turns are within one step's
quarter of each other, so the tenant has at least a k-th of them; among its prompts the oldest come first. The last term
is the step that runs when the prompt arrives, the step in which it ends, and the rounding of turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

RESERVE = 4
_OPTIMISM = 0.9  # a prompt is too late when even a tenth less than predicted would be


class Waiter(Protocol):
    """What the order asks of a prompt."""

    @property
    def tenant(self) -> str: ...
    @property
    def remaining(self) -> int:
        """Tokens that are not computed, at least 1."""
        ...

    @property
    def wanted_by(self) -> float:
        """Monotonic seconds at which its first token is wanted; infinite: no such objective."""
        ...


W = TypeVar("W", bound=Waiter)


def delay_bound(older_tokens: int, tokens: int, tenants: int, chunk_tokens: int) -> int:
    """The bound of this module's docstring, in tokens computed from arrival to the prompt's end."""
    return RESERVE * tenants * (older_tokens + tokens) + (tenants + 1) * (chunk_tokens + RESERVE)


def pressing(prompts: Iterable[W], now: float, rest_s: Callable[[W], float], step_s: float) -> list[W]:
    """Those that go before the shortest, earliest objective first.

    Args:
        now: monotonic seconds.
        rest_s: seconds that the rest of a prompt takes when it has all steps to itself.
        step_s: seconds of one step of others.
    """
    found = []
    for prompt in prompts:
        if prompt.wanted_by < math.inf:
            rest = rest_s(prompt)
            if now + rest * _OPTIMISM <= prompt.wanted_by < now + rest + step_s:
                found.append(prompt)
    return sorted(found, key=lambda p: p.wanted_by)


@dataclass
class Turns:
    """Reserved tokens that each tenant with a prompt here has had. Bound: as many entries as there are prompts."""

    had: dict[str, int] = field(default_factory=dict)

    def keep(self, tenants: Iterable[str]) -> None:
        """Forgets tenants that have left, and lets new ones begin behind everybody."""
        present = dict.fromkeys(tenants)
        last = max((self.had[t] for t in present if t in self.had), default=0)
        self.had = {t: self.had.get(t, last) for t in present}

    def took(self, tokens: Iterable[tuple[str, int]]) -> None:
        for tenant, count in tokens:
            self.had[tenant] = self.had.get(tenant, 0) + count

    def order(self, prompts: Sequence[W]) -> list[W]:
        """`prompts`, oldest first, in the order of their turns: the next tenant's, oldest first, then another's."""
        ranked: dict[str, int] = {}
        for prompt in prompts:
            ranked.setdefault(prompt.tenant, len(ranked))  # of equal tenants the one with the oldest prompt
        return sorted(prompts, key=lambda p: (self.had.get(p.tenant, 0), ranked[p.tenant]))


@dataclass(frozen=True)
class Shares:
    """Tokens per prompt of one step."""

    shortest: dict[int, int]  # position in the list of prompts -> tokens
    reserved: dict[int, int]  # the same, beyond `shortest`

    def of(self, index: int) -> int:
        return self.shortest.get(index, 0) + self.reserved.get(index, 0)

    @property
    def chosen(self) -> list[int]:
        """Whoever has a part, oldest first."""
        return sorted(self.shortest.keys() | self.reserved.keys())


def share_out(
    prompts: Sequence[Waiter], turns: Turns, chunk_tokens: int, batch_tokens: int, first: Sequence[Waiter] = ()
) -> Shares:
    """Tokens of the next step.

    Args:
        prompts: whoever can compute, oldest first.
        chunk_tokens: of the whole step at most; at least RESERVE.
        batch_tokens: up to which a step of short prompts is filled.
        first: of `prompts`, those that go before the shortest, in this order.
    """
    rank = {id(prompt): number for number, prompt in enumerate(first)}
    position = {id(prompt): index for index, prompt in enumerate(prompts)}
    free = chunk_tokens * (RESERVE - 1) // RESERVE
    shortest: dict[int, int] = {}
    taken = 0
    for prompt in sorted(prompts, key=lambda p: (rank.get(id(p), len(rank)), p.remaining)):  # equal ones as they are
        room = (min(batch_tokens, free) if taken else free) - taken
        if room <= 0:
            break
        shortest[position[id(prompt)]] = take = min(prompt.remaining, room)
        taken += take
    reserved: dict[int, int] = {}
    left = -(-taken // (RESERVE - 1))
    for prompt in turns.order(prompts):
        index = position[id(prompt)]
        take = min(prompt.remaining - shortest.get(index, 0), left)
        if take:
            reserved[index] = take
            left -= take
    return Shares(shortest, reserved)
