"""What a step costs on this worker, learned from the steps it ran.

    seconds = fixed + per_token * tokens + per_pair * pairs

`pairs` are (new token, token it reads) pairs, so that a chunk far into a long prompt is known to cost more. The
coefficients are those, none negative, that make the *relative* error of recent steps smallest: least squares with
each step forgotten by `_FORGET` per step after it. They follow a machine whose load changes within some tens of steps,
which is right for planning the next one. What others are told is learned with a memory of `TOLD_S` seconds of steps
instead: the many short steps of streams would soon have driven out the few of a prompt, without which nothing tells a
token's cost from a step's.
"""

from __future__ import annotations

from collections.abc import Iterable

TOLD_S = 10.0
_FORGET = 0.96
_LEAST_KEPT = 0.9  # of all before, after one step, however long
_SWEEPS = 8  # of coordinate descent, from the last solution on
_SCALES = (1.0, 1 / 256, 1 / 65536)  # bring the three terms to the same size

Span = tuple[int, int]  # start, tokens of one chunk


def pairs(start: int, tokens: int) -> int:
    """Pairs of a chunk of `tokens` after `start` cached ones; each token reads itself and all before it."""
    return tokens * start + tokens * (tokens + 1) // 2


class StepCost:
    """Predicts the seconds of a step. Nothing is known before the first `observe`.

    Args:
        half_life_s: seconds of steps after which one counts half; 0: it is forgotten by the number of those after it.
    """

    def __init__(self, half_life_s: float = 0.0) -> None:
        self._half_life_s = half_life_s
        self._known = [0.0, 0.0, 0.0]
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    @property
    def known(self) -> bool:
        return any(self._known)

    @property
    def fixed_s(self) -> float:
        return self._known[0] * _SCALES[0]

    @property
    def token_s(self) -> float:
        return self._known[1] * _SCALES[1]

    @property
    def pair_s(self) -> float:
        return self._known[2] * _SCALES[2]

    def observe(self, spans: Iterable[Span], seconds: float) -> None:
        """Learns from a step of these chunks."""
        row = [value / max(seconds, 1e-9) for value in _terms(spans)]
        kept = max(_LEAST_KEPT, 0.5 ** (seconds / self._half_life_s)) if self._half_life_s else _FORGET
        for i in range(3):
            self._targets[i] = kept * self._targets[i] + row[i]
            for j in range(3):
                self._sums[i][j] = kept * self._sums[i][j] + row[i] * row[j]
        if not self.known:  # one step says only what a token costs with everything else in it
            self._known[1] = 1 / row[1]
            return
        for _ in range(_SWEEPS):
            for i in range(3):
                others = sum(self._sums[i][j] * self._known[j] for j in range(3) if j != i)
                self._known[i] = max(0.0, (self._targets[i] - others) / self._sums[i][i])

    def predict(self, spans: Iterable[Span]) -> float:
        """Seconds of a step of these chunks; 0 while nothing is known."""
        return sum(known * term for known, term in zip(self._known, _terms(spans), strict=True))

    def prompt_s(self, tokens: int, start: int, chunk_tokens: int) -> float:
        """Seconds of the rest of a prompt that has all steps to itself: `tokens` of it after `start`."""
        steps = -(-tokens // chunk_tokens)
        return self.predict([(start, tokens)]) + (steps - 1) * self.fixed_s if tokens else 0.0

    def full_token_s(self, chunk_tokens: int) -> float:
        """Seconds of a token in a full step, its part of the fixed cost included, without the pairs."""
        return self.token_s + self.fixed_s / chunk_tokens

    def tokens_per_s(self, chunk_tokens: int) -> float:
        """Rate of a full step at the beginning of a prompt; 0 while nothing is known."""
        seconds = self.predict([(0, chunk_tokens)])
        return chunk_tokens / seconds if seconds > 0 else 0.0


def _terms(spans: Iterable[Span]) -> tuple[float, float, float]:
    spans = tuple(spans)
    tokens = sum(count for _, count in spans)
    reads = sum(pairs(start, count) for start, count in spans)
    return 1.0, tokens * _SCALES[1], reads * _SCALES[2]
