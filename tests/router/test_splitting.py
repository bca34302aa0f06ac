"""Prompts that a prefill and a decode worker compute together: where they are split, predictions by hand, and when."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cache_transfer.contract import WorkerContract
from pdserve.registry.records import DECODE, PREFILL, SPLIT, Load
from router.gate import Gate, Match, Pair
from router.outcomes import Outcomes
from router.placement import Demand, place
from router.prediction import PENALTY, Site
from router.splitting import GAIN, LEAST, best_split, forecast
from tests.router.support import contract, member

P = Load(pages_total=256, waiting_limit=8, prefill_tokens_per_s=1000, transfer_bytes_per_s=1e18, chunk_tokens=512)
D = Load(pages_total=256, waiting_limit=8, prefill_tokens_per_s=1000, chunk_tokens=512)
LAYERS = 32
CONTRACT = contract(planes=contract().planes[:1] * LAYERS)


def among(mode: str = "auto", able: bool = True, of: WorkerContract = CONTRACT) -> tuple[Match, ...]:
    capabilities = frozenset({SPLIT}) if able else frozenset()
    decode = member("d0", DECODE, of, takes_prompts=True, capabilities=capabilities)
    return Gate(disaggregate=mode).judge([member("p0", PREFILL, CONTRACT), decode]).matches


def placed(matches: tuple[Match, ...], prefill: Load = P, decode: Load = D, tokens: int = 1024, held: int = 0) -> Pair:
    loads = {PREFILL: prefill, DECODE: decode}
    holders = {match.decodes[0].record.incarnation: held for match in matches}
    return place(matches, Demand(tokens, tokens + 1, holders), lambda m: loads[m.record.role], random.Random(1))


def test_both_halves_of_a_prompt_take_half_of_its_time_and_a_layer() -> None:
    split = forecast(Site(P, ()), Site(D, ()), 1024, 512, CONTRACT)
    assert split.first_token_s == pytest.approx(0.512 + 0.512 / LAYERS)
    assert split.measured and not split.penalty_s
    best, tokens = best_split(Site(P, ()), Site(D, ()), 1024, CONTRACT)
    assert best is not None and tokens == pytest.approx(512, abs=64)
    assert best.first_token_s <= split.first_token_s


def test_the_end_overlaps_the_last_chunk_of_the_beginning_and_no_earlier_one() -> None:
    small = Site(replace(P, chunk_tokens=128), ())
    half = forecast(small, Site(D, ()), 1024, 512, CONTRACT)
    assert half.first_token_s == pytest.approx(0.512 - 0.128 + 0.512)  # three of four chunks come before the end begins
    best, tokens = best_split(small, Site(D, ()), 1024, CONTRACT)
    assert best is not None and tokens % 128 == 0
    assert best.first_token_s == pytest.approx(half.first_token_s)  # three chunks and seven eighths, wherever it is


def test_streams_at_the_decode_worker_slow_the_end_and_count() -> None:
    busy = Site(replace(D, running=4, decode_step_ms=40, shared_prefill_tokens_per_s=500), ())
    split = forecast(Site(P, ()), busy, 1024, 768, CONTRACT)
    # The last chunk has 256 tokens; the end takes twice its 0.256 s.
    assert split.first_token_s == pytest.approx(0.768 - 0.256 + 0.512 + 0.02)
    assert split.penalty_s == pytest.approx(PENALTY * 4 * 0.256)


def test_what_others_wait_for_is_waited_for_on_both_sides() -> None:
    queued = Site(replace(P, queued_tokens=300), (300,))
    later = forecast(queued, Site(D, ()), 1024, 512, CONTRACT).first_token_s
    assert later == pytest.approx(0.3 + forecast(Site(P, ()), Site(D, ()), 1024, 512, CONTRACT).first_token_s)
    full = Site(replace(D, queued_prefill_tokens=500), (500,))
    # The decode worker begins with the end when it is done with those, long after the beginning has come.
    assert forecast(Site(P, ()), full, 1024, 512, CONTRACT).first_token_s == pytest.approx(0.5 + 0.512)


def test_a_split_is_chosen_where_it_is_clearly_cheaper_than_both_other_ways() -> None:
    pair = placed(among())
    assert pair.split and pair.placement == "split" and (pair.prefill.id, pair.decode.id) == ("p0", "d0")
    assert pair.handoff_tokens % CONTRACT.page_size == 0
    assert pair.choice.split_s < GAIN * min(pair.choice.handoff_s, pair.choice.here_s)
    assert pair.predicted_s == pair.choice.split_s and pair.choice.measured
    outcomes = Outcomes("auto")
    outcomes.begun(pair)
    assert (outcomes.handed_over, outcomes.split, outcomes.computed_at_decode) == (1, 1, 0)


def test_workers_and_modes_that_cannot_split_never_do() -> None:
    assert placed(among("always")).placement == "handoff"
    assert placed(among("never")).placement == "decode"
    assert not placed(among(able=False)).split
    other = replace(CONTRACT, weight_dtype="int8")
    assert other != CONTRACT and not placed(among(of=other)).split


def test_without_rates_or_with_full_queues_or_little_to_compute_there_is_no_place() -> None:
    for prefill, decode in [
        (replace(P, prefill_tokens_per_s=0), D),
        (P, replace(D, prefill_tokens_per_s=0)),
        (replace(P, waiting=8), D),
        (P, replace(D, waiting=8)),
        (replace(P, queued_tokens=1), D),  # others wait, who would overtake it
        (P, replace(D, queued_prefill_tokens=1)),
    ]:
        assert best_split(Site(prefill, ()), Site(decode, ()), 1024, CONTRACT) == (None, 0)
    assert best_split(Site(P, ()), Site(D, ()), 2 * LEAST - 1, CONTRACT) == (None, 0)
    assert best_split(Site(P, ()), Site(D, ()), 2 * LEAST, CONTRACT)[1] == LEAST
    assert best_split(Site(P, ()), Site(D, (), held=1000), 1024, CONTRACT) == (None, 0)
    assert not placed(among(), tokens=64).split


def test_the_handoff_brings_more_than_the_decode_worker_holds() -> None:
    for held in range(0, 900, 37):
        _, tokens = best_split(Site(P, ()), Site(D, (), held=held), 1024, CONTRACT)
        assert not tokens or held < tokens <= 1024 - LEAST


@pytest.mark.parametrize("seed", range(4))
def test_no_prediction_beats_what_both_can_compute_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        prefill = Site(replace(P, prefill_tokens_per_s=rng.uniform(100, 3000)), ())
        load = replace(D, prefill_tokens_per_s=rng.uniform(100, 3000), running=rng.choice([0, 0, 3]))
        decode, tokens = Site(load, ()), rng.randrange(2 * LEAST, 4000)
        best, place = best_split(prefill, decode, tokens, CONTRACT)
        assert best is not None and LEAST <= place <= tokens - LEAST
        together = prefill.load.prefill_tokens_per_s + load.prefill_tokens_per_s
        assert best.first_token_s >= tokens / together


def test_a_contract_without_layers_is_no_division_by_zero() -> None:
    none = replace(CONTRACT, planes=())
    assert isinstance(none, WorkerContract)
    assert forecast(Site(P, ()), Site(D, ()), 1024, 512, none).first_token_s > 0
