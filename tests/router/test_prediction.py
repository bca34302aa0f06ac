"""Handoff or prefill at the decode worker: predictions by hand, and what placement makes of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdserve.registry.records import DECODE, PREFILL, Load
from router.gate import Gate, Match, Pair, without
from router.outcomes import Outcomes
from router.placement import MAX_COST, Demand, place
from router.prediction import PENALTY, Pace, Site, ahead, at_decode, by_handoff, bytes_per_token, pace
from tests.router.support import contract, member

P = Load(pages_total=64, waiting_limit=8, prefill_tokens_per_s=1000, transfer_bytes_per_s=1e6)
D = Load(pages_total=64, waiting_limit=8, prefill_tokens_per_s=800)
BUSY = replace(D, running=4, decode_step_ms=40, shared_prefill_tokens_per_s=400)


def matches(disaggregate: str, prefills: int = 1, decodes: int = 1, able: bool = True) -> tuple[Match, ...]:
    members = [member(f"p{i}", PREFILL) for i in range(prefills)]
    members += [member(f"d{i}", DECODE, takes_prompts=able) for i in range(decodes)]
    return Gate(disaggregate=disaggregate).judge(members).matches


def placed(
    among: tuple[Match, ...], prefill: Load = P, decode: Load = D, tokens: int = 400, failed: bool = False
) -> Pair:
    loads = {PREFILL: prefill, DECODE: decode}
    demand = Demand(tokens, tokens + 1, {}, failed)
    return place(among, demand, lambda m: loads[m.record.role], random.Random(1))


def test_a_prompt_waits_for_the_shorter_ones_and_a_third_more() -> None:
    assert ahead(0, (), 100) == 0
    assert ahead(900, (300, 600), 100) == 0
    assert ahead(900, (300, 600), 300) == 400
    assert ahead(900, (300, 600), 600) == 900  # never more than there is
    assert ahead(900, (300,), 100) == 800  # another router's 600 count in full
    assert ahead(100, (300, 600), 600) == 100  # most of it is computed already


def test_a_handoff_takes_its_wait_its_prefill_what_transfer_is_left_and_half_a_decode_step() -> None:
    idle, busy = Site(P, ()), Site(replace(P, queued_tokens=300), (300,))
    assert by_handoff(idle, Site(D, ()), 500, 1000).first_token_s == pytest.approx(0.5 + 0.256)
    assert by_handoff(idle, Site(D, ()), 500, 4000).first_token_s == pytest.approx(0.5 + 1.5)  # slower than the prefill
    assert by_handoff(busy, Site(D, ()), 500, 1000).first_token_s == pytest.approx(0.3 + 0.5 + 0.256)
    assert by_handoff(busy, Site(D, ()), 200, 1000).first_token_s == pytest.approx(
        0.2 * 4 / 3 + 0.2
    )  # the others share
    assert by_handoff(replace(idle, held=400), Site(D, (), 490), 500, 1000).first_token_s == pytest.approx(0.1 + 0.01)
    assert by_handoff(idle, Site(BUSY, ()), 500, 1000).first_token_s == pytest.approx(0.5 + 0.256 + 0.02)
    slow = replace(BUSY, step_ms=90)  # a prompt is computed beside the streams
    assert by_handoff(idle, Site(slow, ()), 500, 1000).first_token_s == pytest.approx(0.5 + 0.256 + 0.045)
    assert by_handoff(idle, Site(replace(D, waiting=8), ()), 500, 1).first_token_s == float("inf")


def test_at_decode_a_prompt_is_slowed_by_the_streams_and_slows_them() -> None:
    alone = at_decode(Site(D, ()), 400)
    assert alone.first_token_s == pytest.approx(0.5) and alone.measured and not alone.penalty_s
    beside = at_decode(Site(BUSY, ()), 400)
    assert beside.first_token_s == pytest.approx(1.0)
    assert beside.penalty_s == pytest.approx(PENALTY * 4 * 0.5)  # each stands still for half a second
    queued = at_decode(Site(replace(BUSY, queued_prefill_tokens=200), (200,)), 400)
    assert queued.first_token_s == pytest.approx(1.0 + 0.5)
    new = at_decode(Site(replace(D, running=2), ()), 400)  # streams that the worker has not told of yet
    assert new.first_token_s == pytest.approx(1.0)
    assert at_decode(Site(replace(D, waiting=8), ()), 400).first_token_s == float("inf")


def test_a_short_prompt_takes_a_step_all_the_same() -> None:
    slow = Site(replace(D, fixed_step_ms=25.0), ())
    assert at_decode(slow, 8).first_token_s == pytest.approx(0.01 + 0.025)
    assert by_handoff(Site(replace(P, fixed_step_ms=30.0), ()), slow, 10, 0).first_token_s == pytest.approx(0.01 + 0.03)


def test_what_a_token_reads_makes_long_prompts_slower_than_their_rate() -> None:
    exact = replace(P, prefill_tokens_per_s=900, prefill_token_us=1000, prefill_pair_ns=1000)
    assert pace(P) == Pace(0.001) and pace(Load()) == Pace(1 / 500) and pace(Load(), 250) == Pace(1 / 250)
    pairs = sum(range(401, 1001))  # each of 600 tokens after 400 reads itself and all before it
    assert pace(exact).seconds(400, 600) == pytest.approx(0.6 + 1e-6 * pairs)
    long = by_handoff(Site(exact, ()), Site(D, ()), 2000, 0).first_token_s
    assert long == pytest.approx(2.0 + 1e-6 * 2000 * 2001 / 2)
    here = at_decode(Site(replace(BUSY, prefill_token_us=1250, prefill_pair_ns=500), ()), 400).first_token_s
    assert here == pytest.approx(2 * (0.5 + 5e-7 * 400 * 401 / 2))  # half as fast beside its streams


def test_a_step_that_runs_is_waited_for_and_longer_prompts_share_the_next_ones() -> None:
    busy = Site(replace(P, step_ms=400, queued_tokens=900, queued_prefill_tokens=900), (1800,))
    short = by_handoff(busy, Site(D, ()), 60, 0)
    assert short.first_token_s == pytest.approx(0.2 + 0.06 * 4 / 3)
    assert short.penalty_s == pytest.approx(0.06)  # by which the long one comes later
    nearly = Site(replace(P, queued_tokens=6, queued_prefill_tokens=6), (1800,))
    assert by_handoff(nearly, Site(D, ()), 60, 0).first_token_s == pytest.approx(0.066)  # six tokens are left to share
    done = Site(replace(P, queued_tokens=0), (1800,))  # its decode worker has not said so yet
    assert by_handoff(done, Site(D, ()), 60, 0).penalty_s == 0
    beside = at_decode(Site(replace(BUSY, step_ms=40, queued_prefill_tokens=500), (800,)), 40)
    assert beside.first_token_s == pytest.approx(0.02 + 0.1 * 4 / 3)
    assert beside.penalty_s == pytest.approx(PENALTY * 4 * 0.05 + 0.1)


def test_auto_spares_a_busy_prefill_worker_the_short_prompts() -> None:
    among, long = matches("auto"), replace(P, step_ms=400, queued_tokens=900, queued_prefill_tokens=900)
    demand = Demand(64, 65, {}, failed=False)
    loads = {PREFILL: long, DECODE: replace(BUSY, step_ms=40)}
    sizes = {PREFILL: (1800,), DECODE: ()}
    pair = place(among, demand, lambda m: loads[m.record.role], random.Random(1), lambda m: sizes[m.record.role])
    assert pair.here and pair.choice.reason == "cheaper"
    demand = Demand(1800, 1801, {}, failed=False)
    pair = place(among, demand, lambda m: loads[m.record.role], random.Random(1), lambda m: sizes[m.record.role])
    assert not pair.here


def test_without_rates_workers_are_taken_for_equally_fast() -> None:
    cold = Load(pages_total=64)
    assert at_decode(Site(cold, ()), 400, 1000.0).first_token_s == pytest.approx(0.4)
    assert not at_decode(Site(cold, ()), 400, 1000.0).measured
    assert by_handoff(Site(cold, ()), Site(D, ()), 400, 0).first_token_s == pytest.approx(0.5)
    assert (
        at_decode(Site(cold, ()), 400).first_token_s == by_handoff(Site(cold, ()), Site(cold, ()), 400, 0).first_token_s
    )


def test_bytes_of_a_token_are_those_of_all_planes() -> None:
    made = contract()
    scalars = sum(plane.heads * plane.head_dim for layer in made.planes for plane in layer)
    assert bytes_per_token(made) == 4 * scalars and bytes_per_token(replace(made, kv_dtype="bf16")) == 2 * scalars


def test_the_mode_decides_who_may_compute() -> None:
    assert [m.here for m in matches("always")] == [False]
    assert [m.here for m in matches("auto")] == [False, True]
    assert [m.here for m in matches("never")] == [True]
    assert [m.here for m in matches("auto", able=False)] == [False]  # a decode worker of an older version
    assert not matches("never", able=False)
    assert [pair.decode.id for m in matches("never", decodes=3) for pair in m.pairs() if pair.here] == [
        "d0",
        "d1",
        "d2",
    ]


def test_auto_takes_the_cheaper_and_tells_both_predictions() -> None:
    among = matches("auto")
    idle = placed(among)
    assert not idle.here and idle.choice.reason == "cheaper" and idle.choice.measured
    assert 0 < idle.choice.handoff_s < idle.choice.here_s
    full = placed(among, prefill=replace(P, queued_tokens=2000))
    assert full.here and full.choice.here_s < full.choice.handoff_s
    assert full.prefill is full.decode and full.predicted_s == full.choice.here_s
    both = placed(among, prefill=replace(P, queued_tokens=600), decode=BUSY)
    assert not both.here and both.choice.here_s < both.choice.handoff_s < both.choice.here_s + both.choice.penalty_s
    assert placed(among, prefill=replace(P, waiting=8)).choice.handoff_s == MAX_COST


def test_auto_falls_back_where_nobody_else_is_left_and_says_so() -> None:
    assert placed(matches("auto", prefills=0)).choice.reason == "only"
    assert placed(matches("auto", prefills=0), failed=True).choice.reason == "refused"
    assert placed(matches("always")).choice.reason == "mode"
    assert placed(matches("always")).choice.here_s == 0 < placed(matches("always")).choice.handoff_s
    cold = placed(matches("auto"), prefill=Load(pages_total=64, queued_tokens=9000))
    assert not cold.here and cold.choice.reason == "unmeasured"  # or the prefill worker would never get a rate
    assert placed(matches("auto"), prefill=Load(waiting=8, waiting_limit=8)).here


def test_a_decode_worker_that_failed_alone_may_still_be_handed_to() -> None:
    among = matches("auto", decodes=2)
    d0 = next(m for m in among if m.here).decodes[0]
    left = without(among, {Pair(d0, d0).key})
    assert [[d.id for d in m.decodes] for m in left] == [["d0", "d1"], ["d1"]]
    assert [len(m.prefills) for m in left] == [1, 1]


def test_predictions_are_compared_with_what_came() -> None:
    outcomes = Outcomes("auto")
    pair = placed(matches("auto"), prefill=replace(P, queued_tokens=2000))
    guess = placed(matches("auto"), prefill=replace(P, queued_tokens=2000), decode=Load(pages_total=64))
    for seconds in (0.1, 0.5, 0.6, 0.99, 5.0):  # half a second is predicted
        outcomes.begun(pair)
        outcomes.first_token(pair, seconds)
    outcomes.first_token(guess, 1.0)
    outcomes.begun(placed(matches("auto", prefills=0)))
    outcomes.begun(guess)
    outcomes.begun(placed(matches("auto")))
    assert outcomes.ratios == [1, 0, 2, 1, 1] and outcomes.predictions == 5
    assert (outcomes.handed_over, outcomes.computed_at_decode, outcomes.fallbacks, outcomes.cheaper) == (1, 7, 1, 6)
