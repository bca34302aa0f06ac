"""What some layers have beyond attention and one MLP: inputs of their own, and experts beside the MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.experts import Experts
from pdserve.engine.parts import Norm, Product

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerInputs:
    """A second embedding of each token, a row for each layer, together with a projection of the first.

    A layer adds its row where `OwnInput` says.
    """

    table: Tensor  # [vocab_size, layers * width]
    projection: Product  # of the embedding: width of the stream -> layers * width
    norm: Norm  # of one layer's row of it
    scale: Tensor  # of the table's rows, []

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """ids [T] and their embedding as the first layer gets it, [T, stream] -> [T, layers, width]."""
        rows, width = len(ids), self.norm.width
        token = (self.table[ids] * self.scale).view(rows, -1, width)
        context = (self.projection(embedded) * embedded.shape[-1] ** -0.5).view(rows, -1, width)
        both: Tensor = (self.norm(context) + token) * 2**-0.5
        return both


@dataclass(frozen=True)
class OwnInput:
    """What a layer adds to its output of its own input: norm(proj(act(gate y) * input))."""

    gate: Product  # stream -> width of the input
    proj: Product
    norm: Norm

    def __call__(self, y: Tensor, own: Tensor, activate: Map) -> Tensor:
        """y [T, stream], own [T, width] -> [T, stream]."""
        return self.norm(self.proj(activate(self.gate(y)) * own))


@dataclass(frozen=True)
class Beside:
    """Experts beside an MLP: each side has norms of its own, and the router reads the stream by another."""

    experts: Experts
    mlp_norm: Norm  # of what the MLP gave
    norm: Norm  # of what the experts read
    out_norm: Norm  # of what they gave
    router_norm: Norm

    def __call__(self, y: Tensor, added: Tensor, gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The stream y between attention and MLP, and what the MLP gave; [T, stream] each -> both sides' sum."""
        return self.mlp_norm(added) + self.out_norm(self.experts(self.norm(y), gated, self.router_norm(y)))
