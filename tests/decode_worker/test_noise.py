"""The noise of draws: within its range, fixed, uniform and independent."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker.noise import draw, gumbel, noise_bits, noise_key

VOCAB = 49152
Floats = NDArray[np.float64]

# 99.9 % points of the chi-square distribution by degrees of freedom. Seeds are fixed, so
# each test gives one number for ever.
CHI_999 = {8: 26.12, 63: 103.44, 15: 37.70}
DRAWS = 8000

NOISE_KEY_0 = 16294208416658607535
NOISE_BITS = [2618751803949887, 4046721438692068]


def test_noise_stays_inside_its_range() -> None:
    edge = gumbel(np.array([0, 2**52 - 1], np.uint64))
    assert np.isfinite(edge).all() and edge[0] < -3 and edge[1] > 36


def test_the_noise_is_fixed() -> None:
    """Continuing elsewhere needs the same noise in every version: these are a promise."""
    assert noise_key(0, 0, 0) == NOISE_KEY_0
    assert noise_bits(noise_key(2**64 - 1, 1, 7), np.array([0, 49151], np.int64)).tolist() == NOISE_BITS


def chi_square(counts: Floats, expected: Floats) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["index", "seed", "choice"])
def test_draws_follow_the_distribution(vary: str) -> None:
    logits = np.log(np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.06, 0.05, 0.03, 0.01]))
    ids = np.arange(9, dtype=np.int64)
    counts = np.zeros(9)
    for n in range(DRAWS):
        counts[draw(ids, logits - logits.max(), noise_key(**{"seed": 7, "choice": 0, "index": 0, vary: n}))] += 1
    assert chi_square(counts, np.exp(logits) * DRAWS) < CHI_999[8]


@pytest.mark.parametrize("vary", ["index", "seed"])
def test_neighbouring_draws_are_independent(vary: str) -> None:
    ids, flat, pairs, last = np.arange(8, dtype=np.int64), np.zeros(8), np.zeros((8, 8)), 0
    for n in range(DRAWS):
        token = draw(ids, flat, noise_key(**{"seed": 3, "choice": 0, "index": 0, vary: n}))
        pairs[last, token] += 1
        last = token
    assert chi_square(pairs, np.full((8, 8), DRAWS / 64)) < CHI_999[63]


def test_noise_is_uniform_over_a_vocabulary() -> None:
    bits = noise_bits(noise_key(11, 0, 0), np.arange(VOCAB, dtype=np.int64))
    for shift in (0, 48):  # lowest and highest four bits
        counts = np.bincount(((bits >> np.uint64(shift)) & np.uint64(15)).astype(np.int64), minlength=16)
        assert chi_square(counts.astype(np.float64), np.full(16, VOCAB / 16)) < CHI_999[15]
