"""A short causal convolution in attention's place, one filter per channel: LFM2's.

    B, C, x = split(W_in h)       y_t = C_t * (bias + sum_j w_j * (B x)_(t - L + 1 + j)),  j from 0 to L - 1

What later tokens read of a token is its row B x alone. So that row is what the layer caches, as one head as wide as the
stream, and the layer sees the last L tokens as a layer with a window of L does: pages, prefixes, copies and handoffs
know no difference. Before a sequence's first token the rows are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.dtypes import wide


@dataclass(frozen=True)
class Convolution:
    weight: Tensor  # [width, L], the last column is of the token itself
    bias: Tensor | None  # [width]

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T, L, width] of the tokens up to each, itself the last -> [T, width] in the weights' dtype.

        Sums in fp32 (or float64), one token after the other: a row's bits depend on nothing else.
        """
        accurate = wide(self.weight.dtype)
        rows, weight = rows.to(accurate), self.weight.to(accurate)
        total = rows[:, 0] * weight[:, 0]
        for token in range(1, weight.shape[1]):
            total = total + rows[:, token] * weight[:, token]
        return (total if self.bias is None else total + self.bias.to(accurate)).to(self.weight.dtype)


def reference(convolution: Convolution, gate: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """What a step must give, from whole sequences.

    gate [n, 1, width]; rows [1, m, width]; visible bool [n, m]: the last visible token is the row's own. Returns
    [n, 1, width].
    """
    found = []
    for own in visible:
        seen = rows[0, own].to(convolution.weight.dtype)
        absent = seen.new_zeros(convolution.weight.shape[1] - len(seen), seen.shape[1])
        found.append(convolution(torch.cat([absent, seen])[None]))
    return gate * torch.stack(found)
