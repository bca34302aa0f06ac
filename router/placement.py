"""Which of the fitting pairs gets a request. Pure functions over load and prediction.

Two candidates at random, the cheaper one wins, ties at random: routers that share a pool
and look at the same old numbers do not all run to the same worker. A worker that probably
holds part of the prompt joins the draw, or a large pool would rarely see its caches again.

Where both a handoff and prefilling at the decode worker are allowed, the best of each that was drawn are compared by
their predicted times (prediction.py), and with the handoff's two workers computing the prompt together (splitting.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pdserve.errors import InvalidRequest
from pdserve.registry.records import Load
from router.gate import Choice, Match, Member, Pair
from router.prediction import Forecast, Site, at_decode, by_handoff, bytes_per_token
from router.room import Room
from router.splitting import GAIN, best_split, may_split

T = TypeVar("T")


MAX_COST = 1e12  # what is told of an infinite one


@dataclass(frozen=True)
class Demand:
    """What a request will need, and who probably has some of it (incarnation -> tokens)."""

    prompt_tokens: int
    cache_tokens: int  # what decode takes pages for at once, see `cache_tokens`
    held: Mapping[bytes, int]
    failed: bool = False  # a handoff, for this request


Prompts = Callable[[Member], tuple[int, ...]]


def cache_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Tokens a decode worker takes pages for when it grants a request: what arrives, and the first growth.

    A request of one token needs the logits only, hence no page. The rest of an answer gets its
    pages one by one, so it counts only against what a worker can hold at all (`worker_room`).
    """
    return prompt_tokens + 1 if max_tokens > 1 else 0


def shared(left: Room, right: Room) -> Room:
    """What two workers of these rooms can take together."""
    return Room(min(left.prompt, right.prompt), min(left.total, right.total))


def room(pair: Pair) -> Room:
    return shared(pair.prefill.room, pair.decode.room)


def widest(matches: Iterable[Match]) -> Room:
    """The room of the pair that takes the longest prompt, then the longest output. `matches` must not be empty."""

    def order(room: Room) -> tuple[int, int]:
        return room.prompt, room.total

    rooms = []
    for match in matches:
        # More room at decode never makes less of a pair, so only the roomiest one need be tried.
        roomiest = max((member.room for member in match.decodes), key=order)
        rooms += [shared(room, roomiest) for room in {prefill.room for prefill in match.prefills}]
    return max(rooms, key=order)


def check_prompt_length(prompt_tokens: int, limit: Room) -> None:
    """Raises InvalidRequest with both counts for a prompt that no pair can ever take."""
    if prompt_tokens > limit.prompt:
        raise too_long(f"{prompt_tokens} tokens", limit)


def too_long(size: str, limit: Room) -> InvalidRequest:
    """For a prompt of that size, in words."""
    return InvalidRequest(
        f"the prompt has {size}, the pool takes at most {limit.prompt} tokens (context {limit.total})",
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


def decode_cost(load: Load, prompt_tokens: int, cache_tokens: int, held_tokens: int, page_size: int) -> float:
    """Predicted slowness of a decode worker, in running sequences.

    Every running or waiting sequence makes a step longer; pages short of the request mean
    waiting for others to finish; a prefix already held need not travel.
    """
    if load.waiting_limit and load.waiting >= load.waiting_limit:
        return float("inf")
    need = max(1, -(-cache_tokens // page_size))
    shortage = _missing_pages(load, cache_tokens, page_size) / need
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


def place(
    matches: Sequence[Match],
    demand: Demand,
    load: Callable[[Member], Load],
    rng: random.Random,
    prompts: Prompts = lambda member: (),
) -> Pair:
    """The pair, with the reasons for it.

    Args:
        matches: not empty.
        load: of a member, with the router's own corrections.
        prompts: sizes of the prompts that the router has at a member.
    """

    def site(member: Member) -> Site:
        return Site(load(member), prompts(member), _held(demand, member))

    handoffs, here = ([m for m in matches if m.here is kind] for kind in (False, True))
    pair = _by_handoff(handoffs, demand, load, rng) if handoffs else None
    handoff = None
    if pair is not None:
        size = bytes_per_token(pair.prefill.record.contract)
        handoff = by_handoff(site(pair.prefill), site(pair.decode), demand.prompt_tokens, size)
    rate = load(pair.prefill).prefill_tokens_per_s if pair is not None else 0.0

    def forecast(member: Member) -> Forecast:
        return at_decode(site(member), demand.prompt_tokens, rate)

    decodes = {member.record.incarnation: member for match in here for member in match.decodes}
    if not decodes:
        return _chosen(pair, "mode", handoff, None)
    member = pick(list(decodes.values()), lambda m: forecast(m).cost_s, rng, lambda m: _held(demand, m))
    alone = Pair(member, member, choice=Choice(0, len(decodes), 0.0, _decode_cost(demand, load(member), member)))
    local = forecast(member)
    if handoff is None:
        return _chosen(alone, "refused" if demand.failed else "only", None, local)
    # Until the prefill worker has a rate it is given prompts, or it would never get one.
    known = handoff.measured or handoff.first_token_s == float("inf")
    best = alone if known and local.cost_s < handoff.cost_s else pair
    split = None
    if pair is not None and may_split(pair, decodes):
        contract = pair.decode.record.contract
        split, tokens = best_split(site(pair.prefill), site(pair.decode), demand.prompt_tokens, contract)
        if split is not None and split.cost_s < GAIN * min(local.cost_s, handoff.cost_s):
            best = replace(pair, handoff_tokens=tokens)
    return _chosen(best, "cheaper" if handoff.measured and local.measured else "unmeasured", handoff, local, split)


def _chosen(
    pair: Pair | None, reason: str, handoff: Forecast | None, local: Forecast | None, split: Forecast | None = None
) -> Pair:
    if pair is None:
        raise ValueError("a place was looked for among no pairs")
    mine = split if pair.split else local if pair.here else handoff
    choice = replace(
        pair.choice,
        reason=reason,
        handoff_s=min(handoff.first_token_s, MAX_COST) if handoff else 0.0,
        here_s=min(local.first_token_s, MAX_COST) if local else 0.0,
        split_s=min(split.first_token_s, MAX_COST) if split else 0.0,
        penalty_s=local.penalty_s if local else 0.0,
        wait_s=mine.wait_s if mine is not None else 0.0,
        queue_s=mine.queue_s if mine is not None else 0.0,
        measured=mine is not None and mine.measured,
    )
    return replace(pair, choice=choice)


def _held(demand: Demand, member: Member) -> int:
    return min(demand.held.get(member.record.incarnation, 0), demand.prompt_tokens - 1)


def _decode_cost(demand: Demand, load: Load, member: Member) -> float:
    page_size = member.record.contract.page_size
    cost = decode_cost(load, demand.prompt_tokens, demand.cache_tokens, _held(demand, member), page_size)
    return min(cost, MAX_COST)


def _by_handoff(matches: Sequence[Match], demand: Demand, load: Callable[[Member], Load], rng: random.Random) -> Pair:
    """Picks the prefill worker first (it decides the first token), then a decode worker that fits it."""

    def held(member: Member) -> int:
        return _held(demand, member)

    def prefill(member: Member) -> float:
        return prefill_cost(load(member), demand.prompt_tokens, held(member), member.record.contract.page_size)

    def decode(member: Member) -> float:
        return _decode_cost(demand, load(member), member)

    # One prefill group may match several decode groups.
    prefills = {member.record.incarnation: member for match in matches for member in match.prefills}
    chosen = pick(list(prefills.values()), prefill, rng, held)
    fitting = [
        Pair(chosen, d, match.conversions) for match in matches if chosen in match.prefills for d in match.decodes
    ]
    pair = pick(fitting, lambda pair: decode(pair.decode), rng, lambda pair: held(pair.decode))
    costs = min(prefill(pair.prefill), MAX_COST), decode(pair.decode)
    return replace(pair, choice=Choice(len(prefills), len(fitting), *costs))


def _missing_pages(load: Load, tokens: int, page_size: int) -> int:
    """Pages this many tokens need beyond those free now; cached ones can be evicted."""
    if not load.pages_total:
        return 0
    need = -(-tokens // page_size)
    return max(0, need - (load.pages_total - load.pages_held))
