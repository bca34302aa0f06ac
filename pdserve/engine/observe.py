"""What the run of one sequence leaves to compare with another run of the same tokens.

A `Recording` watches an engine's steps; `observed` joins what the steps of one sequence did to one
`Observed`, one row per token:

    x         the layer's input                      k, v      as they lie in the cache afterwards
    attended  attention before its projection        y         the layer's output
    visible   the first key each row saw, and the end of what it saw

Large runs keep an even choice of columns; the norm of each whole row says whether the rest agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.checks import CHECKS, check_step
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepOutput
from pdserve.engine.trace import StepTrace
from pdserve.errors import Internal

LAYER_TENSORS = ("x", "k", "v", "visible", "attended", "y")  # in the order of computation
_SPREAD = 0.6180339887498949  # fractional part of the golden ratio: no stride ever meets the head size


def columns(width: int, count: int) -> Tensor:
    """`count` of `width` column numbers, ascending: one in each of `count` equal cells. int64."""
    if count <= 0 or count >= width:
        return torch.arange(width)
    cell = torch.arange(count, dtype=torch.float64)
    return ((cell + (cell * _SPREAD) % 1.0) * (width / count)).floor().long().clamp(max=width - 1)


@dataclass(frozen=True)
class Rows:
    """One tensor, a row per token, on the CPU."""

    shape: tuple[int, ...]  # of one row, whole
    data: Tensor  # [n, columns], the whole row or `columns(width, count)` of it
    norms: Tensor  # [n] float64: Euclidean norm of each whole row

    @classmethod
    def of(cls, tensor: Tensor, count: int = 0) -> Rows:
        """tensor [n, ...]. count: columns kept; 0: all."""
        flat = tensor.detach().cpu().reshape(tensor.shape[0], -1)
        return cls(tuple(tensor.shape[1:]), flat, flat.double().norm(dim=1)).chosen(count)

    @property
    def width(self) -> int:
        """Columns of a whole row."""
        width = 1
        for size in self.shape:
            width *= size
        return width

    def chosen(self, count: int) -> Rows:
        """With at most `count` columns. Raises Internal for a choice out of another choice."""
        if not 0 < count < self.data.shape[1]:
            return self
        if self.data.shape[1] != self.width:
            raise Internal(f"{count} columns of {self.data.shape[1]} are another choice", field="columns")
        return replace(self, data=self.data[:, columns(self.width, count)])

    def __getitem__(self, rows: slice) -> Rows:
        return replace(self, data=self.data[rows], norms=self.norms[rows])


@dataclass(frozen=True)
class Observed:
    """One sequence's run. Rows cover `ids`: the prompt, then the outputs that were fed back."""

    ids: tuple[int, ...]
    prompt_tokens: int
    positions: tuple[int, ...]  # of each row, as embedding and rotation saw it
    layers: tuple[Mapping[str, Rows], ...]  # LAYER_TENSORS; what a run cannot show is absent
    cached: tuple[int, ...]  # per layer: tokens that its cache holds
    logits: tuple[Tensor, ...]  # [vocab] raw scores after the prompt, then after each output fed back
    outputs: tuple[int, ...] = ()  # tokens chosen; empty: none were


@dataclass(frozen=True)
class Broken:
    """A statement of `checks.CHECKS` that did not hold."""

    check: str
    message: str


@dataclass(frozen=True)
class Part:
    """What one step did for one sequence: tokens [start, end)."""

    start: int
    end: int
    pages: tuple[int, ...]
    positions: tuple[int, ...]
    layers: tuple[Mapping[str, Tensor], ...]

    def cut(self, start: int, end: int) -> Part:
        """The part of it in [start, end)."""
        first, last = max(start, self.start), min(end, self.end)
        rows = slice(first - self.start, last - self.start)
        layers = tuple({name: tensor[rows] for name, tensor in layer.items()} for layer in self.layers)
        return replace(self, start=first, end=last, positions=self.positions[rows], layers=layers)


class Recording:
    """Takes each traced step of an engine, runs every check on it, and keeps the tensors by sequence.

    What does not hold is kept, too, and not raised.
    """

    def __init__(self, engine: Engine) -> None:
        self.parts: dict[str, list[Part]] = {}
        self.logits: dict[str, list[Tensor]] = {}
        self.broken: list[Broken] = []
        self._engine = engine

    def add(self, trace: StepTrace, output: StepOutput) -> None:
        """A step that has run, before the next one begins."""
        for name in CHECKS:
            try:
                check_step(self._engine, trace, output, frozenset({name}))
            except Internal as error:
                self._note(Broken(name, error.message))
        if trace.batch is None:
            raise Internal("the trace is of no step", field="trace")
        row = 0
        for chunk in trace.batch.chunks:
            rows = slice(row, row + len(chunk.ids))
            self.parts.setdefault(chunk.key, []).append(_part(chunk, trace, rows))
            row = rows.stop
        for key, scores in output.logits.items():
            self.logits.setdefault(key, []).append(scores.detach().clone())  # a sampler may change them

    def observed(
        self,
        parts: Sequence[Part],
        ids: tuple[int, ...],
        prompt_tokens: int,
        logits: Sequence[Tensor],
        outputs: Sequence[int] = (),
        *,
        count: int = 0,
    ) -> Observed:
        """Joins the parts of one sequence and reads its cache through the last one's block table.

        Args:
            parts: in order, without gap, over all of `ids`; from any engine of this model.
            count: columns kept; 0: all.

        Call before the pages are used again. Raises Internal for a gap.
        """
        parts = _whole(parts, len(ids))
        pages, cache = parts[-1].pages, self._engine.cache
        layers, cached = [], []
        for index in range(self._engine.spec.layers):
            layer = {
                name: Rows.of(torch.cat([part.layers[index][name] for part in parts]), count)
                for name in parts[0].layers[index]
            }
            k, v = (t.transpose(0, 1) for t in cache.sequence(index, pages, len(ids)))  # [n, Hkv, d]
            if not cache.planes[index]:
                cached.append(len(ids))  # nothing to hold, hence nothing missing
                layers.append(layer)
                continue
            cached.append(int((k.flatten(1).any(1) | v.flatten(1).any(1)).sum()))  # never written: zero
            kept = {name: Rows.of(t, count) for name, t in (("k", k), ("v", v)) if t.shape[1]}
            layers.append({**layer, **kept})
        positions = tuple(position for part in parts for position in part.positions)
        scores = tuple(row.detach().cpu().clone() for row in logits)
        return Observed(ids, prompt_tokens, positions, tuple(layers), tuple(cached), scores, tuple(outputs))

    def _note(self, broken: Broken) -> None:
        if broken.check not in {known.check for known in self.broken}:  # the first place says most
            self.broken.append(broken)


def _part(chunk: Chunk, trace: StepTrace, rows: slice) -> Part:
    if trace.batch is None:
        raise Internal("the trace is of no step", field="trace")
    layers = tuple(
        {
            "x": layer.x[rows].cpu(),  # a device has its memory for serving
            **({"attended": layer.attended[rows].cpu()} if layer.attended.shape[1] else {}),
            "y": layer.y[rows].cpu(),
            "visible": torch.stack([layer.first[rows], layer.end[rows]], 1).cpu(),
        }
        for layer in trace.layers
    )
    end = chunk.start + len(chunk.ids)
    return Part(chunk.start, end, chunk.pages, tuple(trace.batch.positions[rows].tolist()), layers)


def _whole(parts: Sequence[Part], tokens: int) -> list[Part]:
    """The parts cut to meet without gap or overlap from 0 to `tokens`; of an overlap the later part counts."""
    cut: list[Part] = []
    end = tokens
    for part in reversed(parts):
        if part.start < end:
            cut.insert(0, part.cut(0, end))
            end = part.start
    if end != 0 or not cut or cut[-1].end != tokens:
        raise Internal(f"the steps seen do not cover the {tokens} tokens", reason="TRACE_GAP", field="trace")
    return cut
