"""A mixture of experts: a router picks `active` of the MLPs for each token and adds their outputs up, weighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine import deterministic
from pdserve.engine.dtypes import wide

Map = Callable[[Tensor], Tensor]
Gated = Callable[[Tensor, Tensor], Tensor]  # what gate and up give -> what down reads


@dataclass(frozen=True)
class Expert:
    """down(gated(gate z, up z))."""

    gate: Map  # width -> inner width
    up: Map
    down: Map  # inner width -> width

    def __call__(self, z: Tensor, gated: Gated) -> Tensor:
        return self.down(gated(self.gate(z), self.up(z)))


@dataclass(frozen=True)
class Experts:
    router: Map  # width -> a score per expert
    experts: tuple[Expert, ...]
    active: int
    norm: bool  # the weights of those chosen are scaled to add up to 1
    tiled: bool  # deterministic mode: z has the rows of one tile
    shared: Expert | None = None  # every row takes it too, weighted by the sigmoid of
    shared_router: Map | None = None  # width -> 1
    correction: Tensor | None = None  # [experts], in fp32 or wider; None: a softmax
    gains: Tensor | None = None  # [experts], in fp32 or wider: factor on each one's weight

    def __call__(self, z: Tensor, gated: Gated, routed: Tensor | None = None) -> Tensor:
        """z [T, width] -> [T, width]; experts are added in ascending order. routed: what the router reads; None: z."""
        weights, chosen = self.route(z if routed is None else routed)
        out = torch.zeros_like(z)
        for number in sorted(set(chosen.flatten().tolist())):
            hit = chosen == number  # [T, active], at most once per row
            if self.tiled:
                out = self._add_tile(out, number, z, (weights * hit).sum(-1), hit.any(-1), gated)
            else:
                rows = hit.any(-1).nonzero()[:, 0]
                out.index_add_(0, rows, self._run(number, z[rows], gated) * weights[hit][:, None])
        if self.shared is None or self.shared_router is None:
            return out
        return out + self._sigmoid(self.shared_router(z)) * self.shared(z, gated)

    def route(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, in z's dtype, and numbers of each row's experts, [T, active] each. Scores are in fp32 or wider."""
        scores = self.router(z).to(wide(z.dtype))
        if self.correction is None:
            weights, chosen = torch.topk(torch.softmax(scores, -1), self.active, -1)
        else:
            scores = self._sigmoid(scores)
            chosen = torch.topk(scores + self.correction, self.active, -1).indices
            weights = scores.gather(-1, chosen)
        if self.norm:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.gains is not None:
            weights = weights * self.gains[chosen]
        return weights.to(z.dtype), chosen

    def _sigmoid(self, x: Tensor) -> Tensor:
        return deterministic.activate(torch.sigmoid, x) if self.tiled else torch.sigmoid(x)

    def _run(self, number: int, z: Tensor, gated: Gated) -> Tensor:
        return self.experts[number](z, gated)

    def _add_tile(self, out: Tensor, number: int, z: Tensor, weight: Tensor, hit: Tensor, gated: Gated) -> Tensor:
        """The expert computes the whole tile, so that a row's bits do not depend on who else takes the expert;
        rows that do not take it stay exactly as they are. weight, hit [T].
        """
        return torch.where(hit[:, None], out + self._run(number, z, gated) * weight[:, None], out)
