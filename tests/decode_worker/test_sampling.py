"""The sampler against a plain-Python oracle and transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode_worker.noise import draw, gumbel, noise_bits, noise_key
from decode_worker.sampling import Choice, Sampler, _greedy_batch, filtered, raw_logprobs, sample
from pdserve.errors import Internal
from pdserve.request import SamplingParams

VOCAB = 49152
GREEDY = SamplingParams(temperature=0, seed=0)
Floats = NDArray[np.float64]

FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 40},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.5},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6, "top_k": 300, "top_p": 0.8, "temperature": 1.7},
    {"top_k": VOCAB, "top_p": 0.5},
]


def random_logits(seed: int, size: int = VOCAB, spread: float = 3.0) -> Floats:
    return np.asarray(np.random.default_rng(seed).normal(0, spread, size), np.float64)


def row(sampler: Sampler, logits: Floats) -> tuple[Sampler, torch.Tensor]:
    return sampler, torch.from_numpy(logits)


def choose(params: SamplingParams, logits: Floats, **kwargs: Any) -> Choice:
    return Sampler(params, (), **kwargs).choose(logits)


def oracle_support(scores: list[float], params: SamplingParams) -> set[int]:
    """Temperature, min-p, top-k, top-p straight from their definitions."""
    best = max(scores)
    left = {i: (s - best) / params.temperature for i, s in enumerate(scores) if s > -math.inf}
    if params.min_p > 0:
        left = {i: s for i, s in left.items() if math.exp(s) >= params.min_p}
    order = sorted(left, key=lambda i: (-left[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = sum(math.exp(left[i]) for i in order)
        kept: list[int] = []
        mass = 0.0
        for i in order:
            if kept and mass >= params.top_p * total:
                break
            kept.append(i)
            mass += math.exp(left[i])
        order = kept
    return set(order)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_support_equals_the_oracle_over_a_real_vocabulary(options: Mapping[str, Any]) -> None:
    params = replace(SamplingParams(), **options)
    scores = random_logits(1)
    scores[::7] = -math.inf
    ids, scaled = filtered(scores, params)
    assert set(ids.tolist()) == oracle_support(scores.tolist(), params)
    assert (np.diff(ids) > 0).all()
    np.testing.assert_allclose(scaled, (scores[ids] - scores.max()) / params.temperature, rtol=1e-14)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_support_equals_transformers_warpers(options: Mapping[str, Any]) -> None:
    params = replace(SamplingParams(), **options)
    scores = random_logits(2)
    rows, ids = torch.from_numpy(scores)[None].clone(), torch.zeros((1, 1), dtype=torch.long)
    rows = TemperatureLogitsWarper(params.temperature)(ids, rows)
    if params.min_p:
        rows = MinPLogitsWarper(params.min_p)(ids, rows)
    if params.top_k:
        rows = TopKLogitsWarper(params.top_k)(ids, rows)
    if params.top_p < 1:
        rows = TopPLogitsWarper(params.top_p)(ids, rows)
    expected = torch.isfinite(rows[0]).nonzero().flatten().tolist()
    assert filtered(scores, params)[0].tolist() == expected


def test_the_repetition_penalty_equals_transformers() -> None:
    scores, prompt, output = random_logits(3), (5, 9, 5, 40000), (7, 9, 7)
    sampler = Sampler(SamplingParams(repetition_penalty=1.3), prompt)
    for token in output:
        sampler.record(token)
    ids = torch.tensor([[*prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, torch.from_numpy(scores)[None].clone())[0]
    np.testing.assert_array_equal(sampler.shaped(scores), expected.numpy())


def test_presence_and_frequency_count_output_only() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=(0, 1, 1))
    for token in (2, 3, 3, 3):
        sampler.record(token)
    assert sampler.shaped(np.zeros(5)).tolist() == [0.0, 0.0, -0.75, -1.25, 0.0]


def test_bias_comes_before_penalties() -> None:
    sampler = Sampler(SamplingParams(logit_bias={1: 4.0}, repetition_penalty=2.0), prompt=(1,))
    assert sampler.shaped(np.array([0.0, -2.0, 1.0])).tolist() == [0.0, 1.0, 1.0]  # (-2 + 4) / 2


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_small_temperatures_are_greedy(temperature: float, filters: Mapping[str, Any]) -> None:
    for seed in range(5):
        logits = random_logits(seed, 1000, spread=50.0)
        logits[3] = -math.inf
        params = replace(SamplingParams(temperature=temperature, seed=seed), **filters)
        assert choose(params, logits).token == int(np.argmax(logits))


@pytest.mark.parametrize("penalty", [1e-300, 1e-6, 1e6])
def test_extreme_penalties_never_give_nan(penalty: float) -> None:
    logits = random_logits(4, 50, spread=1e30)
    logits[4] = -math.inf
    sampler = Sampler(SamplingParams(repetition_penalty=penalty, temperature=1e-300), prompt=range(50))
    scores = sampler.shaped(logits)
    assert not np.isnan(scores).any() and scores[4] == -math.inf
    assert 0 <= sampler.choose(logits).token < 50


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([0.0, 2.0, 2.0, 2.0, 1.0])
    assert choose(SamplingParams(temperature=0), logits).token == 1
    assert filtered(logits, SamplingParams(top_k=2))[0].tolist() == [1, 2]
    assert [t.id for t in raw_logprobs(logits, 2, 3).top] == [1, 2, 3]
    assert raw_logprobs(logits, 2, 0).chosen.rank == 1
    [plain] = sample([row(Sampler(SamplingParams(temperature=0), ()), logits)])
    assert isinstance(plain, Choice) and plain.token == 1


def test_ends_are_not_drawn_before_min_tokens() -> None:
    logits = np.array([9.0, 1.0, 8.0, 0.0])
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2), (), ends=frozenset({0, 2}))
    drawn = []
    for _ in range(3):
        drawn.append(sampler.choose(logits).token)
        sampler.record(drawn[-1])
    assert drawn == [1, 1, 0]


def test_bans_hold_under_sampling() -> None:
    logits = np.zeros(8)
    logits[[1, 5]] = -math.inf
    drawn = {choose(SamplingParams(seed=seed, logit_bias={1: 100.0}), logits).token for seed in range(200)}
    assert drawn == {0, 2, 3, 4, 6, 7}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_alone(bad: float, temperature: float) -> None:
    good, broken = random_logits(5, 100), random_logits(6, 100)
    broken[50] = bad
    params = SamplingParams(temperature=temperature, seed=1)
    rows = [row(Sampler(params, ()), x) for x in (good, broken, good)]
    first, second, third = sample(rows)
    assert isinstance(second, Internal) and second.reason == "LOGITS_NOT_FINITE"
    assert isinstance(first, Choice) and first == third


def test_nothing_left_is_an_error() -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=1), (), ends=frozenset({0, 1}))
    with pytest.raises(Internal, match="no token is left"):
        sampler.choose(np.zeros(2))


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(7)
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={123: 100.0}, logprobs=20)
    choice = choose(params, logits)
    expected = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    best, ids = expected.topk(20)
    assert choice.token == 123 and choice.logprobs is not None
    assert choice.logprobs.chosen.logprob == pytest.approx(float(expected[123]), abs=1e-12)
    assert choice.logprobs.chosen.rank == int((expected > expected[123]).sum())
    assert [t.id for t in choice.logprobs.top] == ids.tolist()
    assert [t.logprob for t in choice.logprobs.top] == pytest.approx(best.tolist(), abs=1e-12)
    assert [t.rank for t in choice.logprobs.top] == list(range(20))


def test_a_draw_does_not_depend_on_the_batch() -> None:
    options = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_p=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0),
    ]
    rows = [row(Sampler(p, (3, 4)), random_logits(n, 2000)) for n, p in enumerate(options)]
    together = sample(rows)
    assert together == [sample([one])[0] for one in rows]
    assert together == sample(rows[::-1])[::-1]


def test_pruned_draws_equal_the_full_argmax() -> None:
    for seed in range(20):
        scaled = random_logits(seed, 5000)
        scaled -= scaled.max()
        ids = np.arange(5000, dtype=np.int64)
        key = noise_key(seed, 0, 0)
        assert draw(ids, scaled, key) == int(np.argmax(scaled + gumbel(noise_bits(key, ids))))


def test_a_draw_does_not_depend_on_what_filters_removed() -> None:
    """The noise belongs to the id: removing losers leaves the winner."""
    logits = random_logits(8, 1000)
    for seed in range(50):
        free = choose(SamplingParams(seed=seed), logits).token
        if free in filtered(logits, SamplingParams(top_k=50))[0]:
            assert choose(SamplingParams(seed=seed, top_k=50), logits).token == free


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_rows_of_several_devices_are_kept_apart(first: str) -> None:
    """A new request's logits are on the host, a running one's on the device; here that is one without data."""
    logits = random_logits(1, 50)
    rows = {
        "cpu": row(Sampler(GREEDY, (1,)), logits),
        "meta": (Sampler(GREEDY, (1,)), torch.empty(50, device="meta")),
    }
    order = [first, *({"cpu", "meta"} - {first})]
    outcome = dict(zip(order, sample([rows[name] for name in order]), strict=True))
    assert outcome["cpu"] == Choice(int(logits.argmax()))
    failed = outcome["meta"]
    assert isinstance(failed, Internal) and failed.reason == "SAMPLER_FAILED"


def test_rows_away_from_the_host_are_reduced_together() -> None:
    rows = [torch.from_numpy(random_logits(n, 50)) for n in range(3)]
    rows[1][7] = float("nan")
    outcome = _greedy_batch(rows)
    assert [outcome[0], outcome[2]] == [Choice(int(rows[0].argmax())), Choice(int(rows[2].argmax()))]
    failed = outcome[1]
    assert isinstance(failed, Internal) and failed.reason == "LOGITS_NOT_FINITE"


@pytest.mark.parametrize("params", [SamplingParams(temperature=0, seed=0), SamplingParams(seed=0)])
def test_an_unexpected_error_fails_its_row_alone(params: SamplingParams) -> None:
    good, bad = random_logits(1, 50), torch.tensor(1.0)  # of no dimension: no row
    outcome = sample([(Sampler(params, (1,)), bad), row(Sampler(GREEDY, (1,)), good)])
    failed = outcome[0]
    assert isinstance(failed, Internal) and failed.reason == "SAMPLER_FAILED"
    assert outcome[1] == Choice(int(good.argmax()))
