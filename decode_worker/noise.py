"""Randomness that is counter based: the noise of one token id is a hash of (seed, choice, output index, id).

So a draw depends on nothing else: not on the batch, the worker, or what was drawn before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the increment and the two factors of SplitMix64 (Steele et al. 2014)
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def draw(ids: Ids, scaled: Floats, key: int) -> int:
    """The id of argmax(scaled + Gumbel noise); `ids` rise, so a tie goes to the lowest."""
    bits = noise_bits(key, ids)
    # The noise rises with its bits. Only ids which the largest noise of the row could lift
    # above the best score's own sum can win; the others are spared two logarithms each.
    floor = gumbel(bits[np.argmax(scaled)]) - gumbel(bits.max()) - 1e-6
    close = np.flatnonzero(scaled >= floor)
    return int(ids[close[np.argmax(scaled[close] + gumbel(bits[close]))]])


def noise_key(seed: int, choice: int, index: int) -> int:
    """64 bits that stand for one output position of one choice under one seed."""
    key = _mix(seed)
    for part in (choice, index):
        key = _mix(key ^ _mix(part))
    return key


def noise_bits(key: int, ids: Ids) -> NDArray[np.uint64]:
    """52 uniform bits per id: SplitMix64 of the key at counter id + 1."""
    z = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(12)


def gumbel(bits: NDArray[np.uint64]) -> Floats:
    """Standard Gumbel noise -log(-log u), with u in (0, 1) exclusive from 52 bits."""
    u = (np.asarray(bits).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(u)), np.float64)


def _mix(value: int) -> int:
    """SplitMix64's output function on one 64-bit number."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FACTOR_1) & _MASK
    z = ((z ^ (z >> 27)) * _FACTOR_2) & _MASK
    return z ^ (z >> 31)
