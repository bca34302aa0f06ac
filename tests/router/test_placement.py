"""Placement: pure functions over load and prediction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pdserve.errors import InvalidRequest
from pdserve.registry.records import DECODE, PREFILL, Load
from router.gate import Gate, Match, Member, Pair
from router.placement import (
    Demand,
    cache_tokens,
    check_prompt_length,
    decode_cost,
    pick,
    place,
    prefill_cost,
    room,
    widest,
)
from router.prefixes import BLOCK_TOKENS, PrefixRecord, chain
from router.room import Room
from tests.router.support import contract, member

IDLE = Load(pages_total=64, waiting_limit=8)


def matches_of(prefills: int, decodes: int) -> tuple[Match, ...]:
    members = [member(f"p{i}", PREFILL) for i in range(prefills)] + [member(f"d{i}", DECODE) for i in range(decodes)]
    return Gate().judge(members).matches


def chosen(
    matches: tuple[Match, ...], loads: Mapping[str, Load], held: Mapping[bytes, int] | None = None, prompt: int = 64
) -> Counter[tuple[str, str]]:
    """How often each pair is placed in 200 draws."""
    rng = random.Random(5)
    demand = Demand(prompt, prompt + 16, held or {})

    def load(m: Member) -> Load:
        return loads.get(m.id, IDLE)

    placed = [place(matches, demand, load, rng) for _ in range(200)]
    return Counter((pair.prefill.id, pair.decode.id) for pair in placed)


def test_prefill_cost_counts_queued_work_and_what_the_prompt_adds() -> None:
    assert prefill_cost(IDLE, 100, 0, 16) == 100
    assert prefill_cost(replace(IDLE, queued_tokens=300), 100, 60, 16) == 340
    # 7 pages are needed and 4 are free: three pages of waiting.
    assert prefill_cost(replace(IDLE, pages_held=60), 100, 0, 16) == 100 + 3 * 16
    assert prefill_cost(replace(IDLE, waiting=8), 100, 0, 16) == float("inf")


def test_decode_cost_grows_with_sequences_and_missing_pages_and_falls_with_a_held_prefix() -> None:
    idle = decode_cost(IDLE, 64, 80, 0, 16)
    assert idle == 0
    assert decode_cost(replace(IDLE, running=3, waiting=1), 64, 80, 0, 16) == 4
    assert decode_cost(replace(IDLE, pages_held=64), 64, 80, 0, 16) == 4 + 1  # nothing free, all held
    assert decode_cost(IDLE, 64, 80, 64, 16) == -1
    assert decode_cost(replace(IDLE, waiting=8), 64, 80, 0, 16) == float("inf")


def test_the_cheaper_of_two_wins_and_ties_are_even() -> None:
    costs = {"a": 1.0, "b": 2.0}
    rng = random.Random(1)
    assert {pick(["a", "b"], costs.__getitem__, rng) for _ in range(50)} == {"a"}
    tied = Counter(pick(["a", "b", "c", "d"], lambda _: 0.0, rng) for _ in range(4000))
    assert all(800 < count < 1200 for count in tied.values())


def test_the_worst_of_many_is_never_chosen_and_the_rest_share() -> None:
    costs = {i: float(i) for i in range(8)}
    rng = random.Random(2)
    drawn = Counter(pick(list(costs), costs.__getitem__, rng) for _ in range(2000))
    assert drawn[7] == 0  # it loses every draw of two
    assert set(drawn) == set(range(7))


def test_a_busy_prefill_worker_is_avoided() -> None:
    placed = chosen(matches_of(2, 1), {"p0": replace(IDLE, queued_tokens=5000)})
    assert set(placed) == {("p1", "d0")}


def test_a_full_decode_worker_is_avoided() -> None:
    placed = chosen(matches_of(1, 2), {"d1": replace(IDLE, pages_held=64)})
    assert set(placed) == {("p0", "d0")}


def test_a_worker_with_the_prefix_always_joins_the_draw() -> None:
    matches = matches_of(12, 1)
    holder = next(m for m in matches[0].prefills if m.id == "p7")
    assert set(chosen(matches, {}, {holder.record.incarnation: 48})) == {("p7", "d0")}
    # ... but load can outweigh it.
    placed = chosen(matches, {"p7": replace(IDLE, queued_tokens=500)}, {holder.record.incarnation: 48})
    assert ("p7", "d0") not in placed


def test_room_is_the_smallest_of_contexts_and_pools() -> None:
    def of(prefill_context: int, decode_context: int, prefill_pages: int, decode_pages: int) -> Room:
        p = member("p", PREFILL, contract(context_limit=prefill_context), load=Load(pages_total=prefill_pages))
        d = member("d", DECODE, contract(context_limit=decode_context), load=Load(pages_total=decode_pages))
        return room(Pair(p, d))

    assert of(512, 256, 64, 64) == Room(prompt=255, total=256)
    assert of(512, 512, 4, 64) == Room(prompt=64, total=512)
    # The last token is never cached: 8 pages of 16 hold prompt + output - 1.
    assert of(512, 512, 64, 8) == Room(prompt=128, total=129)


def test_the_widest_pair_is_that_of_all_pairs() -> None:
    """Found group by group; here compared with looking at every pair."""
    rng = random.Random(3)
    for _ in range(50):
        members = [
            member(
                f"{role}{i}",
                role,
                contract(context_limit=rng.choice([0, 96, 256]), page_size=rng.choice([8, 16])),
                load=Load(pages_total=rng.choice([0, 3, 9, 20])),
            )
            for role in (PREFILL, DECODE)
            for i in range(3)
        ]
        matches = Gate().judge(members).matches
        rooms = [room(pair) for match in matches for pair in match.pairs()]
        assert len(rooms) == 9
        assert widest(matches) == max(rooms, key=lambda r: (r.prompt, r.total))


def test_what_arrives_and_the_first_growth_count_and_nothing_for_logits_alone() -> None:
    assert [cache_tokens(20, max_tokens) for max_tokens in (1, 2, 100)] == [0, 21, 21]


def test_placement_keeps_to_fitting_groups() -> None:
    other = contract(page_size=32)
    strange = contract(model_digest=b"x" * 32)
    members = [
        *(member(f"p{i}", PREFILL) for i in range(2)),
        member("s0", PREFILL, strange),
        member("d0", DECODE),
        member("d1", DECODE, other),
        member("t0", DECODE, strange),
    ]
    placed = chosen(Gate().judge(members).matches, {})
    assert set(placed) == {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1"), ("s0", "t0")}


def test_a_prompt_that_no_pair_takes_is_refused_with_both_counts() -> None:
    check_prompt_length(255, Room(255, 256))
    with pytest.raises(InvalidRequest, match=r"256 tokens.*255") as caught:
        check_prompt_length(256, Room(255, 256))
    assert caught.value.reason == "PROMPT_TOO_LONG"


PROMPT = tuple(range(3 * BLOCK_TOKENS + 5))


def test_prefixes_are_known_block_by_block() -> None:
    seen = PrefixRecord(max_blocks=100)
    seen.record(chain(PROMPT, b"c", None, "t"), b"one")
    seen.record(chain(PROMPT[: 2 * BLOCK_TOKENS], b"c", None, "t"), b"two")
    assert seen.held_tokens(chain(PROMPT, b"c", None, "t")) == {b"one": 3 * BLOCK_TOKENS, b"two": 2 * BLOCK_TOKENS}
    changed = (*PROMPT[:40], 999, *PROMPT[41:])
    assert seen.held_tokens(chain(changed, b"c", None, "t")) == {b"one": BLOCK_TOKENS, b"two": BLOCK_TOKENS}


@pytest.mark.parametrize("root", [(b"other", None, "t"), (b"c", b"adapter", "t"), (b"c", b"", "t"), (b"c", None, "u")])
def test_prefixes_never_meet_across_models_adapters_and_tenants(root: tuple[bytes, bytes | None, str]) -> None:
    seen = PrefixRecord(max_blocks=100)
    seen.record(chain(PROMPT, b"c", None, "t"), b"one")
    assert seen.held_tokens(chain(PROMPT, *root)) == {}


def test_the_record_of_prefixes_is_bounded_and_forgets_ends_before_beginnings() -> None:
    seen = PrefixRecord(max_blocks=4)
    seen.record(chain(PROMPT, b"c", None, "t"), b"one")
    seen.record(chain(PROMPT[::-1], b"c", None, "t"), b"two")
    assert len(seen) == 4
    assert seen.held_tokens(chain(PROMPT[::-1], b"c", None, "t")) == {b"two": 3 * BLOCK_TOKENS}
    assert seen.held_tokens(chain(PROMPT, b"c", None, "t")) == {b"one": BLOCK_TOKENS}
