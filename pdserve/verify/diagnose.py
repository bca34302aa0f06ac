"""Where to look first, from where two runs begin to differ.

In the order of the contract: weights and inference mode, position offset, causality, cache length
per layer, head mapping. Each hint says what it was concluded from; none is a proof.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_transfer.contract import diff
from pdserve.engine.observe import Observed
from pdserve.verify.compare import WORST, Comparison, Finding, agreed, default_tolerance
from pdserve.verify.observing import Run
from pdserve.verify.sides import REUSED

CONTRACT_HINTS = (
    ("MODEL_DIGEST", "weights"),
    ("POSITION_SCHEME", "positions"),
    ("ATTENTION.sliding_window", "causality"),
    ("ATTENTION", "weights"),
    ("PLANES", "heads"),
)


class _Case:
    """The first divergence with what surrounds it."""

    def __init__(self, comparison: Comparison, first: Finding) -> None:
        self.comparison, self.first = comparison, first
        self.left, self.right = comparison.left, comparison.right
        self.a: Observed = self.left.observed[first.prompt]
        self.b: Observed = self.right.observed[first.prompt]
        self.found = {(f.layer, f.tensor): f for f in comparison.findings if f.prompt == first.prompt}
        self.rows = agreed(self.a.ids, self.b.ids)

    def ok(self, tensor: str) -> bool:
        """The first divergence's layer has this tensor right, on both sides."""
        found = self.found.get((self.first.layer, tensor))
        return found is not None and found.ok

    def is_at(self, *tensors: str) -> bool:
        return self.first.tensor in tensors

    def values(self, tensor: str) -> tuple[Tensor, Tensor] | None:
        """Whole rows of both sides [n, ...] at the layer; None where a side shows less."""
        layers = self.a.layers[self.first.layer], self.b.layers[self.first.layer]
        if any(tensor not in layer or layer[tensor].data.shape[1] != layer[tensor].width for layer in layers):
            return None
        x, y = (layer[tensor].data[: self.rows].double().view(-1, *layer[tensor].shape) for layer in layers)
        return x, y

    def near(self, x: Tensor, y: Tensor) -> bool:
        limit = WORST * max(self.comparison.tolerance, default_tolerance(self.left, self.right))
        return float((x - y).norm()) <= limit * max(float(x.norm()), 1e-30)


def diagnose(comparison: Comparison) -> tuple[str, ...]:
    """Hints about the first divergence; empty when there is none."""
    hints = [
        f"{run.side.text}: a rule of the engine does not hold ({broken.check}): {broken.message}"
        for run in (comparison.left, comparison.right)
        for broken in run.broken
    ]
    first = comparison.first
    if first is None:
        return tuple(hints)
    hints += _from_contracts(comparison.left, comparison.right)
    if first.tensor == "run":
        return (*hints, "the run ended before there was anything to compare; its error is the finding")
    case = _Case(comparison, first)
    for look in (_weights, _positions, _causality, _cache, _heads, _logits, _since):
        hint = look(case)
        if hint:
            hints.append(hint)
    return tuple(hints)


def _from_contracts(left: Run, right: Run) -> list[str]:
    if left.contract is None or right.contract is None:
        return []
    hints = []
    for difference in diff(left.contract, right.contract):
        about = next((hint for code, hint in CONTRACT_HINTS if difference.code.startswith(code)), None)
        if about is not None:
            hints.append(f"{about}: the contracts differ in {difference}")
    return hints


def _weights(case: _Case) -> str | None:
    layer = case.first.layer
    if case.is_at("x"):
        return "weights: the first layer already reads other values (ids, embedding, or a learned position table)"
    if case.is_at("k") and case.ok("x") and not case.ok("v"):
        return f"weights: layer {layer} reads the same and makes other keys and values (its norm or projections)"
    if case.is_at("v") and case.ok("x"):
        return f"weights: layer {layer} makes the same keys and other values (value projection)"
    if case.is_at("y") and case.ok("attended"):
        return f"weights: layer {layer} attends alike and writes other values (output projection, MLP or its norm)"
    return None


def _positions(case: _Case) -> str | None:
    if case.is_at("positions"):
        return f"positions: token {case.first.token} was given another position ({case.first.detail})"
    if case.is_at("k") and case.ok("v"):
        both = case.values("k")
        turned = both is not None and _turned(case, *both)
        how = "and differ by a rotation only" if turned else "and no rotation explains it"
        return f"positions: keys differ, values do not {how} (position offset, rope base or scaling; key projection)"
    return None


def _turned(case: _Case, x: Tensor, y: Tensor) -> bool:
    """Rotary pairs (i, i + d/2) keep their length under any rotation."""
    lengths = [torch.hypot(*t.chunk(2, -1)) for t in (x, y)]
    return case.near(*lengths) and not case.near(x, y)


def _causality(case: _Case) -> str | None:
    if case.is_at("visible"):
        return f"causality: token {case.first.token} {case.first.detail}"
    if not case.is_at("attended"):
        return None
    both = case.values("attended")
    if both is None or case.a.prompt_tokens < 2:
        return None
    last = case.a.prompt_tokens - 1
    wrong = [row for row in range(last + 1) if not case.near(both[0][row], both[1][row])]
    if wrong and last not in wrong:
        return (
            "causality: the prompt's last row agrees and earlier ones do not, so they take in keys after themselves "
            "(mask, or softmax over masked keys)"
        )
    return None


def _cache(case: _Case) -> str | None:
    if case.is_at("length"):
        return f"cache length: layer {case.first.layer} has {case.first.detail}"
    made = case.values("attended") if case.is_at("k", "v") else None
    if made is not None and case.near(*(t[: case.a.prompt_tokens] for t in made)):
        return (
            f"cache: layer {case.first.layer} computed the prompt alike and its cache holds other {case.first.tensor} "
            "(what was stored or transferred, not what was computed)"
        )
    return None


def _heads(case: _Case) -> str | None:
    """The first token attends to itself alone: each head's result is its KV head's value."""
    if not case.is_at("attended"):
        return None
    attended, values = case.values("attended"), case.values("v")
    if attended is None or values is None:
        return None
    result, v = attended[1][0], values[1][0]  # [Hq, d], [Hkv, d]
    group = len(result) // len(v)
    for head, row in enumerate(result):
        own = head // group
        other = next((j for j in range(len(v)) if j != own and case.near(v[j], row)), None)
        if other is not None and not case.near(v[own], row):
            return f"head mapping: query head {head} reads KV head {other} instead of {own}"
    return None


def _logits(case: _Case) -> str | None:
    if not case.is_at("logits"):
        return None
    scores = case.b.logits[0].double()
    for number, other in enumerate(case.left.observed):
        if number != case.first.prompt and case.near(other.logits[0].double(), scores):
            return f"first-step prefix: these are the logits of prompt {number + 1}"
    if all(found.ok for (layer, _), found in case.found.items() if 0 <= layer < len(case.a.layers)):
        return "first-step prefix: every layer agrees, so another row's logits were taken, or norm or head differ"
    return None


def _since(case: _Case) -> str | None:
    """What the first token with an error says about when it began."""
    first, run = case.first, case.right
    if first.layer < 0 or first.layer >= len(case.a.layers) or first.token < 0:
        return None
    both = case.values(first.tensor)
    if both is None:
        return None
    wrong = [row for row in range(len(both[0])) if not case.near(both[0][row], both[1][row])]
    if not wrong:
        return None
    begin = wrong[0]
    if begin >= case.a.prompt_tokens:
        return "decode: the prompt agrees, it begins with the tokens that run one at a time (padding, or their batch)"
    if run.side.way == REUSED and run.reused:
        held = run.reused[first.prompt]
        if 0 < held <= begin:
            return f"reuse: the {held} reused tokens agree, it begins with the first one computed after them"
        if held and wrong[-1] < held:
            return "reuse: only reused tokens differ, so the prefix was not this model's (adapter, identity)"
    return None
