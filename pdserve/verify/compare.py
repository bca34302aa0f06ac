"""Two runs of the same prompts, compared layer by layer in the order of computation.

Exact: positions, the number of cached tokens per layer, which keys each row saw, and where values
are not finite. Within a tolerance: every tensor, the raw logits, and the ranks of the best ids,
which may only change places with ids that score alike. Equal bits are reported, and not asked for.

The error of a row is the norm of the difference over the norm of the row in the baseline, so that
one large row cannot hide another. A tensor is within a tolerance T (declared per dtype in
`checks.TOLERANCES`) if the mean over its rows is at most T and the worst row at most WORST * T:
rounding meets single rows hard, where a layer begins a very large value, but never all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from pdserve.engine.checks import TOLERANCES
from pdserve.engine.observe import LAYER_TENSORS, Observed, Rows
from pdserve.errors import FieldDifference, Incompatible
from pdserve.verify.observing import Run, Shape
from pdserve.verify.sides import PEER, Side

ORDER = ("run", "positions", "x", "length", *LAYER_TENSORS[1:], "logits", "top", "tokens")
WORST = 5.0  # times the tolerance: what a single row may have
RANKS = 5  # best ids whose order is compared
_FLOOR = 1e-3  # of the largest row's norm: what a norm counts at least, or rows of zeros would divide by zero


@dataclass(frozen=True)
class Finding:
    """One tensor of one layer for one prompt."""

    prompt: int
    layer: int  # -1: before the first; the number of layers: after the last
    tensor: str  # one of ORDER
    ok: bool
    max_abs: float = 0.0
    error: float = 0.0  # of the worst row
    mean: float = 0.0  # over the rows
    tolerance: float = 0.0  # 0: must be equal
    bits_equal: bool = True
    token: int = -1  # row with the largest error
    detail: str = ""

    @property
    def place(self) -> tuple[int, int, int]:
        """Earlier in the computation is less."""
        return self.layer, ORDER.index(self.tensor), self.prompt


@dataclass(frozen=True)
class Comparison:
    """All findings about one side against the baseline, in the order of computation."""

    left: Run
    right: Run
    tolerance: float
    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding | None:
        """The first that is out of tolerance."""
        return next((finding for finding in self.findings if not finding.ok), None)

    @property
    def equal(self) -> bool:
        """Everything is within tolerance, and no side broke a rule of its own."""
        return self.first is None and not self.left.broken and not self.right.broken


def compare(left: Run, right: Run, tolerance: float | None = None) -> Comparison:
    """Raises Incompatible when the two models have other sizes, naming every one that differs."""
    check_sizes(left.side, left.shape, right.side, right.shape)
    limit = default_tolerance(left, right) if tolerance is None else tolerance
    findings: list[Finding] = []
    for run in (left, right):
        if run.error is not None:
            findings.append(Finding(0, -1, "run", False, error=float("inf"), detail=f"{run.side.text}: {run.error}"))
    if not findings:
        for number, (a, b) in enumerate(zip(left.observed, right.observed, strict=True)):
            findings += _prompt(number, a, b, limit)
    return Comparison(left, right, limit, tuple(sorted(findings, key=lambda finding: finding.place)))


def check_sizes(left: Side, a: Shape, right: Side, b: Shape) -> None:
    """Raises Incompatible with every size in which two models differ."""
    pairs = (("LAYERS", a.layers, b.layers), *_planes(a, b), ("VOCAB_SIZE", a.vocab_size, b.vocab_size))
    found = tuple(FieldDifference(code, str(x), str(y)) for code, x, y in pairs if x != y)
    if found:
        raise Incompatible(
            f"{left.text} and {right.text} are models of other sizes",
            field=found[0].code,
            remedy="compare two runs, precisions or conversions of one model",
            differences=found,
        )


def _planes(a: Shape, b: Shape) -> tuple[tuple[str, object, object], ...]:
    """The first plane in which two models differ; one difference in every layer is told once."""
    for layer, (ours, theirs) in enumerate(zip(a.planes, b.planes, strict=False)):
        if ours is None or theirs is None:
            continue
        names = [plane.name for plane in ours], [plane.name for plane in theirs]
        if names[0] != names[1]:
            return ((f"PLANES[{layer}]", *names),)
        for x, y in zip(ours, theirs, strict=True):
            if x != y:
                where = f"PLANES[{layer}].{x.name}"
                return (f"{where}.heads", x.heads, y.heads), (f"{where}.head_dim", x.head_dim, y.head_dim)
    return ()


def default_tolerance(left: Run, right: Run) -> float:
    """Of the coarsest precision that either side computes or caches in."""
    names = set()
    for run in (left, right):
        if run.contract is not None:
            names |= {run.contract.activation_dtype, run.contract.weight_dtype, run.contract.kv_dtype}
        elif run.side.kind == PEER:
            names.add(run.side.engine.dtype)
    return max(TOLERANCES[name] for name in names)


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _prompt(number: int, a: Observed, b: Observed, limit: float) -> Iterator[Finding]:
    rows = agreed(a.ids, b.ids)
    at = Finding(number, -1, "positions", True)
    yield _exact(at, a.positions[:rows], b.positions[:rows])
    for layer, (x, y) in enumerate(zip(a.layers, b.layers, strict=True)):
        here = replace(at, layer=layer)
        short = (len(a.ids) - rows, len(b.ids) - rows)  # outputs that only one side has
        yield _length(here, a.cached[layer] - short[0], b.cached[layer] - short[1], rows)
        for name in LAYER_TENSORS:
            if name in x and name in y:
                yield tensor_finding(replace(here, tensor=name), x[name][:rows], y[name][:rows], limit)
    yield from _scores(replace(at, layer=len(a.layers)), a, b, limit)


def _exact(at: Finding, a: tuple[int, ...], b: tuple[int, ...]) -> Finding:
    wrong = next((row for row, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if wrong is None:
        return at
    return replace(
        at, ok=False, error=float("inf"), bits_equal=False, token=wrong, detail=f"{a[wrong]} against {b[wrong]}"
    )


def _length(at: Finding, a: int, b: int, tokens: int) -> Finding:
    at = replace(at, tensor="length")
    if a == b == tokens:
        return at
    detail = f"{a} against {b} cached of {tokens} tokens"
    return replace(at, ok=False, error=float("inf"), bits_equal=False, detail=detail)


def tensor_finding(at: Finding, a: Rows, b: Rows, limit: float) -> Finding:
    """a, b: rows of the same tokens; `visible` is compared exactly."""
    if a.shape != b.shape or len(a.data) != len(b.data):
        detail = f"shapes {[len(a.data), *a.shape]} and {[len(b.data), *b.shape]}"
        return replace(at, ok=False, error=float("inf"), bits_equal=False, tolerance=limit, detail=detail)
    count = min(a.data.shape[1], b.data.shape[1])
    x, y = a.chosen(count).data.double(), b.chosen(count).data.double()
    if at.tensor == "visible":
        wrong = torch.nonzero((x != y).any(1)).flatten()
        if not len(wrong):
            return at
        row = int(wrong[0])
        seen = [f"[{int(t[row, 0])}, {int(t[row, 1])})" for t in (x, y)]
        detail = f"sees the keys {seen[0]} against {seen[1]}"
        return replace(at, ok=False, error=float("inf"), bits_equal=False, token=row, detail=detail)
    found = values_finding(at, x, y, limit)
    if found.error == float("inf"):
        return found
    if count < a.width:  # what the choice of columns does not show
        return _worse(found, (a.norms - b.norms).abs() / _scale(a.norms), limit)
    return found


def values_finding(at: Finding, x: Tensor, y: Tensor, limit: float) -> Finding:
    """x, y [n, columns] float64."""
    at = replace(at, tolerance=limit)
    finite = torch.isfinite(x), torch.isfinite(y)
    if not torch.equal(*finite):
        row = int(torch.nonzero((finite[0] != finite[1]).any(1))[0])
        return replace(at, ok=False, error=float("inf"), bits_equal=False, token=row, detail="not finite on one side")
    x, y = (torch.where(mask, t, 0.0) for mask, t in zip(finite, (x, y), strict=True))
    difference = x - y
    found = replace(at, max_abs=float(difference.abs().max()), bits_equal=bool(torch.equal(x, y)))
    return _worse(found, difference.norm(dim=1) / _scale(x.norm(dim=1)), limit)


def _worse(at: Finding, errors: Tensor, limit: float) -> Finding:
    """With the errors [n] of the rows, if they are worse than those it has."""
    row = int(errors.argmax())
    worst, mean = max(at.error, float(errors[row])), max(at.mean, float(errors.mean()))
    if worst > at.error or at.token < 0:
        at = replace(at, token=row)
    return replace(at, error=worst, mean=mean, ok=mean <= limit and worst <= WORST * limit)


def _scale(norms: Tensor) -> Tensor:
    """[n]: what the errors of rows with these norms are relative to."""
    return norms.clamp(min=max(float(norms.max()) * _FLOOR, 1e-30))


def _scores(at: Finding, a: Observed, b: Observed, limit: float) -> Iterator[Finding]:
    """Logits after every prefix that both sides ran; then ranks, then the tokens that were chosen."""
    same = agreed(a.outputs, b.outputs)
    steps = min(len(a.logits), len(b.logits), same + 1)
    x, y = (torch.stack(list(side.logits[:steps])).double() for side in (a, b))
    logits = values_finding(replace(at, tensor="logits"), x, y, limit)
    # A row here is a step; its token is the last one that the scores look back on.
    yield replace(logits, token=a.prompt_tokens - 1 + logits.token)
    margins = [2 * limit * float(row.abs().max()) for row in x]
    yield _ranks(replace(at, tensor="top"), x, y, margins, a.prompt_tokens)
    if a.outputs and b.outputs:
        yield _tokens(replace(at, tensor="tokens"), a, b, x, margins, same)


def _ranks(at: Finding, x: Tensor, y: Tensor, margins: list[float], prompt_tokens: int) -> Finding:
    """Best ids in the same order, where scores are further apart than twice the tolerance."""
    count = min(RANKS, x.shape[1])
    for step, (row, other) in enumerate(zip(x, y, strict=True)):
        for rank, (p, q) in enumerate(zip(_best(row, count), _best(other, count), strict=True)):
            gap = abs(float(row[p] - row[q]))
            if p != q and not gap <= margins[step]:
                detail = f"rank {rank + 1}: id {p} against {q}, {gap:.3g} apart in the baseline"
                token = prompt_tokens - 1 + step
                return replace(at, ok=False, error=float("inf"), bits_equal=False, token=token, detail=detail)
    best = _best(x[0], 2)
    margin = float(x[0, best[0]] - x[0, best[-1]])
    return replace(at, detail=f"id {best[0]} first, by {margin:.3g}")


def _tokens(at: Finding, a: Observed, b: Observed, x: Tensor, margins: list[float], same: int) -> Finding:
    """Equal up to the first step whose two best scores are closer than twice the tolerance; best by the scores."""
    for side in (a, b):
        for step, (token, row) in enumerate(zip(side.outputs, side.logits, strict=False)):
            if float(row.max() - row[token]) > 0.0:
                detail = f"{token} was chosen, {int(row.argmax())} scores best"
                at_token = side.prompt_tokens - 1 + step
                return replace(at, ok=False, error=float("inf"), bits_equal=False, token=at_token, detail=detail)
    if same == min(len(a.outputs), len(b.outputs)):
        return replace(at, detail=f"{same} equal")
    gap = abs(float(x[same, a.outputs[same]] - x[same, b.outputs[same]]))
    detail = f"{same} equal, then {a.outputs[same]} against {b.outputs[same]}, {gap:.3g} apart"
    if gap <= margins[same]:
        return replace(at, bits_equal=False, detail=f"{detail}: a near tie")
    token = a.prompt_tokens - 1 + same
    return replace(at, ok=False, error=float("inf"), bits_equal=False, token=token, detail=detail)


def _best(row: Tensor, count: int) -> list[int]:
    """Ids by score, ties to the lower id."""
    found: list[int] = torch.sort(row, descending=True, stable=True).indices[:count].tolist()
    return found
