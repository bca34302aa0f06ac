"""How an output token is chosen from raw logits: the only sampler of the system.

Token 0 (whose logits came with the handoff) and token 100 take the same path. All arithmetic
is float64 on the host. Filters apply in this order: grammar, bias, penalties, temperature, min-p,
top-k, top-p; ids that may not appear yet (`min_tokens`) are removed with those that the grammar forbids.

A token is drawn as argmax(score + Gumbel noise), ties to the lowest id; with temperature 0 the noise (noise.py) is
left out. So greedy and sampled runs share one margin rule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import numpy as np
import torch
from torch import Tensor

from decode_worker.grammar import Constraint
from decode_worker.noise import Floats, Ids, draw, noise_key
from pdserve.errors import Internal, PdserveError
from pdserve.request import SamplingParams
from pdserve.rpc.events import PositionLogprobs, TokenLogprob

log = logging.getLogger(__name__)

P = ParamSpec("P")

_TOP_P_FIRST = 256  # candidates sorted first by top-p; grows until they hold enough mass


@dataclass(frozen=True)
class Choice:
    token: int
    logprobs: PositionLogprobs | None = None  # when asked for


class Sampler:
    """Chooses the tokens of one output, in order.

    `choose` only reads, so the engine thread may call it while the event loop owns the
    object; `record` mutates and belongs to the loop, between two steps.

    Args:
        params: checked options; a seed of None counts as 0 (the router always sets one).
        prompt: token ids that the repetition penalty covers besides the output.
        ends: ids that end the output, and so are not drawn before `min_tokens`.
        choice: index of this output among several of one request.
        constraint: where the output stands in its grammar, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: frozenset[int] = frozenset(),
        choice: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.index = 0  # of the next token
        self._choice = choice
        self._ends = np.fromiter(sorted(ends), np.int64)
        self._bias = np.fromiter(params.logit_bias, np.int64), np.fromiter(params.logit_bias.values(), np.float64)
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._counts: dict[int, int] = {}

    @property
    def plain(self) -> bool:
        """The next choice is the argmax of the raw logits and nothing else is asked for."""
        p = self.params
        shaped = p.logit_bias or p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
        free = self.constraint is None and not self._ends_banned
        return p.temperature == 0 and not shaped and p.logprobs is None and free

    def choose(self, logits: Floats) -> Choice:
        """The next token from raw logits [vocab]; raises Internal when they hold NaN or no finite score."""
        check_logits(logits)
        scores = self.shaped(logits)
        p = self.params
        if p.temperature == 0:
            token = int(np.argmax(scores))
        else:
            ids, scaled = filtered(scores, p)
            token = draw(ids, scaled, noise_key(p.seed or 0, self._choice, self.index))
        return Choice(token, None if p.logprobs is None else raw_logprobs(logits, token, p.logprobs))

    def record(self, token: int) -> None:
        """Notes that `token` is the output's next one. Mutates the penalties' counts, the index, the constraint."""
        self.index += 1
        if self.constraint is not None:
            self.constraint.advance(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self._seen.add(token)

    def shaped(self, logits: Floats) -> Floats:
        """A copy of [vocab] logits with banned ids at -inf, then bias, then penalties."""
        p = self.params
        scores = logits.astype(np.float64, copy=True)
        if self.constraint is not None:
            scores[~self.constraint.allowed()] = -math.inf
        if self._ends_banned:
            scores[self._ends] = -math.inf
        ids, bias = self._bias
        scores[ids] += bias
        if p.repetition_penalty != 1.0:
            seen = np.fromiter(self._seen, np.int64)
            scores[seen] = _repelled(scores[seen], p.repetition_penalty)
        if self._counts and (p.presence_penalty or p.frequency_penalty):
            used = np.fromiter(self._counts, np.int64)
            times = np.fromiter(self._counts.values(), np.float64)
            scores[used] -= p.presence_penalty + p.frequency_penalty * times
        if np.isneginf(scores).all():
            raise Internal("no token is left to sample", reason="NOTHING_TO_SAMPLE")
        return scores

    @property
    def _ends_banned(self) -> bool:
        return self.index < self.params.min_tokens and self._ends.size > 0


def sample(rows: Sequence[tuple[Sampler, Tensor]]) -> list[Choice | PdserveError]:
    """Chooses one token per row; a row that cannot be sampled gives its error, and only that row.

    `rows` pairs a sampler with raw logits [vocab], fp32 or float64, each on any device: the first
    of a sequence came over the wire to the host, later ones are where the model is. Plainly greedy
    rows are not copied on the host, and reduced in one call elsewhere. Nothing is mutated.
    """
    outcome: dict[int, Choice | PdserveError] = {}
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for n, (sampler, logits) in enumerate(rows):
        if sampler.plain and logits.device.type != "cpu":
            away.setdefault((logits.device, logits.dtype), []).append(n)
        else:
            outcome[n] = _guarded(_choose, sampler, logits)
    for numbers in away.values():
        outcome.update(zip(numbers, _greedy_batch([rows[n][1] for n in numbers]), strict=True))
    return [outcome[n] for n in range(len(rows))]


def filtered(scores: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """What temperature, min-p, top-k and top-p leave of [vocab] scores.

    Returns ids in rising order, and their scores over the temperature, relative to the best.
    At least the best id stays. Equal scores at a border: the lowest ids stay.
    """
    ids: Ids = np.flatnonzero(scores > -math.inf)
    # Differences are divided, so that the best score is exactly 0 at any temperature.
    with np.errstate(over="ignore"):
        scaled: Floats = (scores[ids] - scores.max()) / params.temperature
    if params.min_p > 0:
        keep = np.exp(scaled) >= params.min_p
        ids, scaled = ids[keep], scaled[keep]
    if 0 < params.top_k < ids.size:
        best = np.sort(_best(scaled, params.top_k))
        ids, scaled = ids[best], scaled[best]
    if params.top_p < 1:
        best = np.sort(_nucleus(scaled, params.top_p))
        ids, scaled = ids[best], scaled[best]
    return ids, scaled


def raw_logprobs(logits: Floats, token: int, top: int) -> PositionLogprobs:
    """log_softmax of raw [vocab] logits at `token` and at the `top` best ids."""
    x = logits.astype(np.float64)
    best = x.max()
    log_sum = best + math.log(float(np.exp(x - best).sum()))
    rank = int((x > x[token]).sum() + (x[:token] == x[token]).sum())
    chosen = TokenLogprob(token, float(x[token] - log_sum), rank)
    ranked = _best(x, min(top, x.size)) if top else np.empty(0, np.int64)
    return PositionLogprobs(chosen, tuple(TokenLogprob(int(i), float(x[i] - log_sum), n) for n, i in enumerate(ranked)))


def check_logits(logits: Floats) -> None:
    """Raises Internal for NaN, +inf, or a row of -inf only: a plausible token would be a lie."""
    _check_best(float(logits.max()))


def _check_best(best: float) -> None:
    if not math.isfinite(best):  # the maximum is NaN as soon as one element is
        raise Internal(
            f"the model's best logit is {best}",
            reason="LOGITS_NOT_FINITE",
            remedy="check the checkpoint and its dtype",
        )


def _greedy(row: Tensor) -> Choice:
    """Argmax of one [vocab] row, the first of equals. On the host in place: far faster than a copy and torch's."""
    scores = row.detach().cpu().numpy()
    token = int(scores.argmax())
    return _checked(token, float(scores[token]))


def _greedy_batch(rows: Sequence[Tensor]) -> list[Choice | PdserveError]:
    """The same for rows of one dtype on one device: one reduction and one transfer."""
    try:
        values, ids = torch.stack(list(rows)).max(dim=-1)
        best, tokens = values.tolist(), ids.tolist()
    except Exception:
        log.exception("%d rows could not be reduced together", len(rows))
        return [_guarded(_greedy, row) for row in rows]
    return [_guarded(_checked, token, value) for token, value in zip(tokens, best, strict=True)]


def _checked(token: int, best: float) -> Choice:
    _check_best(best)
    return Choice(token)


def _choose(sampler: Sampler, logits: Tensor) -> Choice:
    return _greedy(logits) if sampler.plain else sampler.choose(logits.detach().double().cpu().numpy())


def _guarded(choose: Callable[P, Choice], *args: P.args, **kwargs: P.kwargs) -> Choice | PdserveError:
    """One row's choice or error: whatever is wrong with it, the other sequences of the step go on."""
    try:
        return choose(*args, **kwargs)
    except PdserveError as error:
        return error
    except Exception:
        log.exception("a token could not be chosen")
    return Internal("a token could not be chosen", reason="SAMPLER_FAILED", remedy="see the worker's log")


def _repelled(scores: Floats, penalty: float) -> Floats:
    """Positive scores over the penalty, negative ones times it (Keskar et al. 2019); stays finite."""
    with np.errstate(over="ignore"):
        moved = np.where(scores > 0, scores / penalty, scores * penalty)
    largest = np.finfo(np.float64).max / 4  # so that differences of two such scores stay finite too
    return np.where(np.isneginf(scores), scores, np.clip(moved, -largest, largest))


def _best(scores: Floats, count: int) -> Ids:
    """Indices of the `count` largest scores, best first, equals by index. 0 < count <= size."""
    border = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > border)
    equal = np.flatnonzero(scores == border)[: count - above.size]
    chosen = np.concatenate([above, equal])
    return np.asarray(chosen[np.lexsort((chosen, -scores[chosen]))], np.int64)


def _nucleus(scaled: Floats, top_p: float) -> Ids:
    """Indices of the fewest best scores whose probabilities sum to at least `top_p`, best first.

    A token stays when the ones above it hold less than `top_p` of the mass.
    """
    weights = np.exp(scaled)
    wanted = top_p * float(weights.sum())
    count = min(_TOP_P_FIRST, scaled.size)
    while True:
        best = _best(scaled, count)
        above = np.cumsum(weights[best]) - weights[best]
        # Enough when the sorted part alone reaches the mass, or is everything.
        if count == scaled.size or above[-1] >= wanted:
            stay = above < wanted
            stay[0] = True
            return best[stay]
        count = min(count * 8, scaled.size)
