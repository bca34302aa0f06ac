"""Which of the fitting pairs gets a request. Pure functions over load and prediction.

Two candidates at random, the cheaper one wins, ties at random: routers that share a pool
and look at the same old numbers do not all run to the same worker. A worker that probably
holds part of the prompt joins the draw, or a large pool would rarely see its caches again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdserve.errors import InvalidRequest
from pdserve.registry.records import Load
from router.gate import Member, Pair

T = TypeVar("T")


@dataclass(frozen=True)
class Room:
    """The most tokens a pair can take."""

    prompt: int
    total: int  # prompt and output together


@dataclass(frozen=True)
class Demand:
    """What a request will need, and who probably has some of it (incarnation -> tokens)."""

    prompt_tokens: int
    total_tokens: int
    held: Mapping[bytes, int]


def room(pair: Pair) -> Room:
    """Bounded by both contexts and both page pools. An unstated limit (0) does not bound.

    The last token of an output is never cached, so decode's pool takes one token more than it has slots.
    """
    prefill, decode = pair.prefill.record, pair.decode.record
    contexts = [c for c in (prefill.contract.context_limit, decode.contract.context_limit) if c]
    decode_pool = [decode.load.pages_total * decode.contract.page_size + 1] if decode.load.pages_total else []
    prefill_pool = [prefill.load.pages_total * prefill.contract.page_size] if prefill.load.pages_total else []
    total = min([*contexts, *decode_pool], default=2**31 - 1)
    return Room(prompt=min([total - 1, *prefill_pool]), total=total)


def widest(pairs: Sequence[Pair]) -> Room:
    """The room of the pair that takes the longest prompt, then the longest output."""
    return max((room(pair) for pair in pairs), key=lambda r: (r.prompt, r.total))


def check_prompt_length(prompt_tokens: int, limit: Room) -> None:
    """Raises InvalidRequest with both counts for a prompt that no pair can ever take."""
    if prompt_tokens > limit.prompt:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens, the pool takes at most {limit.prompt} (context {limit.total})",
            reason="PROMPT_TOO_LONG",
            field="prompt",
            remedy=f"shorten the prompt to {limit.prompt} tokens or fewer",
        )


def prefill_cost(load: Load, prompt_tokens: int, held_tokens: int, page_size: int) -> float:
    """Predicted tokens to compute before this prompt is done.

    Queued work, plus what this prompt does not find, plus a wait for pages that are still
    held by others. In tokens, not seconds: the reported rate is that of recent work, by
    which an idle worker would look slow. A full queue costs more than any other.
    """
    if load.waiting_limit and load.waiting >= load.waiting_limit:
        return float("inf")
    missing = _missing_pages(load, prompt_tokens, page_size)
    return load.queued_tokens + (prompt_tokens - held_tokens) + missing * page_size


def decode_cost(load: Load, prompt_tokens: int, total_tokens: int, held_tokens: int, page_size: int) -> float:
    """Predicted slowness of a decode worker, in running sequences.

    Every running or waiting sequence makes a step longer; pages short of the request mean
    waiting for others to finish; a prefix already held need not travel.
    """
    if load.waiting_limit and load.waiting >= load.waiting_limit:
        return float("inf")
    need = max(1, -(-total_tokens // page_size))
    shortage = _missing_pages(load, total_tokens, page_size) / need
    pressure = load.pages_held / load.pages_total if load.pages_total else 0.0
    return load.running + load.waiting + 4 * shortage + pressure - held_tokens / max(1, prompt_tokens)


def pick(
    options: Sequence[T], cost: Callable[[T], float], rng: random.Random, also: Callable[[T], float] | None = None
) -> T:
    """The cheaper of two random options, ties at random; `also` adds the option it rates highest, if above 0."""
    drawn = list(rng.sample(range(len(options)), min(2, len(options))))
    if also is not None:
        best = max(range(len(options)), key=lambda i: also(options[i]))
        if also(options[best]) > 0 and best not in drawn:
            drawn.append(best)
    costs = [cost(options[i]) for i in drawn]
    lowest = min(costs)
    return options[rng.choice([i for i, c in zip(drawn, costs, strict=True) if c == lowest])]


def place(pairs: Sequence[Pair], demand: Demand, load: Callable[[Member], Load], rng: random.Random) -> Pair:
    """Picks the prefill worker first (it decides the first token), then a decode worker that fits it.

    `pairs` must not be empty; `load` gives a member's load with the router's own corrections.
    """

    def held(member: Member) -> int:
        return min(demand.held.get(member.record.incarnation, 0), demand.prompt_tokens - 1)

    def prefill(member: Member) -> float:
        return prefill_cost(load(member), demand.prompt_tokens, held(member), member.record.contract.page_size)

    def decode(member: Member) -> float:
        page_size = member.record.contract.page_size
        return decode_cost(load(member), demand.prompt_tokens, demand.total_tokens, held(member), page_size)

    prefills = list({pair.prefill.record.incarnation: pair.prefill for pair in pairs}.values())
    chosen = pick(prefills, prefill, rng, held)
    fitting = [pair for pair in pairs if pair.prefill is chosen]
    return pick(fitting, lambda pair: decode(pair.decode), rng, lambda pair: held(pair.decode))


def _missing_pages(load: Load, tokens: int, page_size: int) -> int:
    """Pages this many tokens need beyond those free now; cached ones can be evicted."""
    if not load.pages_total:
        return 0
    need = -(-tokens // page_size)
    return max(0, need - (load.pages_total - load.pages_held))
