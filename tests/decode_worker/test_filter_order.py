"""The order of filters that docs/openai.md promises: by transformers' filters, a real vocabulary, in a mixed batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode_worker.sampling import Choice, Sampler, filtered, sample
from pdserve.request import SamplingParams

VOCAB = 40_000
PROMPT, OUTPUT = (3, 5, 5, 90, 17_000), (90, 8, 8, 8, 39_999, 17_000)
SEEDS = 60

Filter = Callable[[Tensor, SamplingParams], Tensor]
ALL = SamplingParams(
    temperature=1.6, min_p=0.02, top_k=12, top_p=0.7, repetition_penalty=1.4, presence_penalty=0.6,
    frequency_penalty=0.5, logit_bias={90: 3.0, 17_000: -2.0, 11: 4.0}, seed=0,
)  # fmt: skip
MIXED = (
    ALL,
    replace(ALL, temperature=1.1, top_k=0, top_p=0.98),
    replace(ALL, temperature=3.0, min_p=0.0, top_k=200, top_p=0.5),
    replace(ALL, top_k=0, top_p=1.0, min_p=0.1),
    replace(ALL, logit_bias={8: 1.0}, presence_penalty=2.0, frequency_penalty=-0.5, min_p=0.1, top_k=50),
    SamplingParams(seed=0, top_k=5),
    SamplingParams(seed=0, temperature=0.0),
)


def applied(processor: Callable[[Tensor, Tensor], Tensor], rows: Tensor, seen: Sequence[int] = OUTPUT) -> Tensor:
    return processor(torch.tensor([seen]), rows.clone())


def bias(rows: Tensor, p: SamplingParams) -> Tensor:
    entries = [[[token], value] for token, value in p.logit_bias.items()]
    return applied(SequenceBiasLogitsProcessor(entries), rows.float()).double() if entries else rows


def penalties(rows: Tensor, p: SamplingParams) -> Tensor:
    """The repetition penalty is transformers'; the other two are OpenAI's formula, over the output alone."""
    if p.repetition_penalty != 1.0:
        rows = applied(RepetitionPenaltyLogitsProcessor(p.repetition_penalty), rows, PROMPT + OUTPUT)
    for token, count in Counter(OUTPUT).items():
        rows[0, token] -= p.presence_penalty + p.frequency_penalty * count
    return rows


def temperature(rows: Tensor, p: SamplingParams) -> Tensor:
    return applied(TemperatureLogitsWarper(p.temperature), rows)


def min_p(rows: Tensor, p: SamplingParams) -> Tensor:
    return applied(MinPLogitsWarper(p.min_p), rows) if p.min_p else rows


def top_k(rows: Tensor, p: SamplingParams) -> Tensor:
    return applied(TopKLogitsWarper(p.top_k), rows) if p.top_k else rows


def top_p(rows: Tensor, p: SamplingParams) -> Tensor:
    return applied(TopPLogitsWarper(p.top_p), rows) if p.top_p < 1 else rows


ORDER: tuple[Filter, ...] = (bias, penalties, temperature, min_p, top_k, top_p)


def logits(number: int) -> Tensor:
    """[VOCAB], with the tokens that filters move among the best; exact in fp32."""
    made = torch.randn(VOCAB, generator=torch.Generator().manual_seed(number))
    made[[3, 5, 8, 11, 90, 17_000, 39_999]] = torch.tensor([4.6, 5.1, 5.4, 2.0, 3.9, 5.2, 4.9])
    return made.double()


def support(row: Tensor, params: SamplingParams, order: Sequence[Filter] = ORDER) -> set[int]:
    rows = row[None].clone()
    for apply in order:
        rows = apply(rows, params)
    return set(torch.isfinite(rows[0]).nonzero().flatten().tolist())


def sampler(params: SamplingParams) -> Sampler:
    made = Sampler(params, PROMPT)
    for token in OUTPUT:
        made.record(token)
    return made


@pytest.mark.parametrize("number", range(len(MIXED) - 1))
def test_what_filters_leave_is_what_the_peers_leave_in_this_order(number: int) -> None:
    params, row = MIXED[number], logits(number)
    ids, _ = filtered(sampler(params).shaped(row.numpy()), params)
    assert set(ids.tolist()) == support(row, params) and len(ids) > 1


def test_in_a_mixed_batch_each_row_draws_from_its_own() -> None:
    rows = [logits(number) for number in range(len(MIXED))]
    drawn: list[set[int]] = [set() for _ in MIXED]
    for seed in range(SEEDS):
        for number, choice in enumerate(
            sample([(sampler(replace(p, seed=seed)), row) for p, row in zip(MIXED, rows, strict=True)])
        ):
            assert isinstance(choice, Choice)
            drawn[number].add(choice.token)
    for params, row, seen in zip(MIXED[:-1], rows[:-1], drawn[:-1], strict=True):
        assert seen <= support(row, params)
        assert len(seen) > 1
    assert drawn[-1] == {int(np.argmax(rows[-1].numpy()))}


@pytest.mark.parametrize(
    "swapped", list(pairwise(ORDER)), ids=lambda pair: f"{pair[0].__name__} and {pair[1].__name__}"
)
def test_two_filters_exchanged_would_be_seen(swapped: tuple[Filter, Filter]) -> None:
    if swapped == (min_p, top_k):
        swapped = (min_p, top_p)  # both cut the same order of scores: the first two leave the same either way
    exchanged = [dict(zip(swapped, swapped[::-1], strict=True)).get(apply, apply) for apply in ORDER]
    rows = [(logits(number), params) for number, params in enumerate(MIXED[:-1])]
    assert any(support(row, params) != support(row, params, exchanged) for row, params in rows)
