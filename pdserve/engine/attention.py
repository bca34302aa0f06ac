"""Attention over a paged cache: the plain reference, and one fast path per shape of work.

    attend       the reference: every score in memory, softmax in fp32 (or float64)
    prefill      many queries of one sequence, in blocks
    decode       one query each of many sequences

Both are grouped matrix products: the query heads that share a KV head are rows of one
product. On CPU they take about half the time of torch's fused kernel, which reads every key
once per query head.

Query head h reads KV head h // (Hq / Hkv); each query sees the keys [first, end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.dtypes import wide
from pdserve.errors import Internal

QUERIES = 64  # rows of a query block


def visible_keys(first: Tensor, end: Tensor, keys: int) -> Tensor:
    """Bool [n, keys]: query i sees key j. first, end [n] int64.

    Raises Internal if a query sees no key: its softmax would be 0/0 (contract A3).
    """
    check_visible(first, end)
    numbers = torch.arange(keys, device=first.device)
    return (numbers >= first[:, None]) & (numbers < end[:, None])


def check_visible(first: Tensor, end: Tensor) -> None:
    """Raises Internal if a query row has no finite score, when the mask is built (contract A3)."""
    empty = torch.nonzero(end <= first)
    if empty.numel():
        raise Internal(f"query row {int(empty[0])} sees no key", reason="EMPTY_QUERY_ROW", field="mask")


def alibi(slopes: Tensor, distance: Tensor, dtype: torch.dtype) -> Tensor:
    """What ALiBi adds to scores: slopes [Hkv, group] times key minus query position, `distance` [n, m].

    Returns [Hkv, group, n, m].
    """
    return (slopes[..., None, None] * distance).to(dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last axis. A sink is one more score of each row: it takes its share of the weight and gives nothing.

    sinks: as scores, with a last axis of 1; axes of 1 before it are repeated.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over visible keys.

    q [n, Hq, d]; k, v [Hkv, m, d]; visible bool [n, m]: the last visible key is the query's own; slopes [Hkv, group]
    of ALiBi; sinks [Hkv, group]. Returns [n, Hq, d] in q's dtype.
    """
    n, heads, d = q.shape
    accurate = wide(q.dtype)
    grouped = q.view(n, k.shape[0], -1, d).permute(1, 2, 0, 3).to(accurate)  # [Hkv, group, n, d]
    scores = grouped @ k[:, None].to(accurate).transpose(-1, -2) * scale  # [Hkv, group, n, m]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None:
        keys = torch.arange(visible.shape[1], device=visible.device)
        own = torch.where(visible, keys, 0).amax(-1, keepdim=True)  # [n, 1]
        scores = scores + alibi(slopes, keys - own, accurate)
    weights = softmax(scores.masked_fill(~visible, -torch.inf), None if sinks is None else sinks[..., None, None])
    out = weights @ v[:, None].to(accurate)  # [Hkv, group, n, d]
    return out.permute(2, 0, 1, 3).reshape(n, heads, d).to(q.dtype)


@dataclass(frozen=True)
class QueryBlock:
    """Query rows [first_row, end_row), at `places` [rows], read the keys [first_key, end_key).

    Every row sees the keys before `bias_from`; `bias` [rows, end_key - bias_from] holds 0 or
    -inf for the rest. Made once per step, used by every layer.
    """

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    bias_from: int
    bias: Tensor
    places: Tensor


def query_blocks(first: Tensor, end: Tensor, dtype: torch.dtype) -> list[QueryBlock]:
    """Blocks for rows of one sequence in ascending order: row i sees the keys [first[i], end[i])."""
    check_visible(first, end)
    blocks = []
    lows, highs = first.tolist(), end.tolist()
    for row in range(0, len(lows), QUERIES):
        last = min(row + QUERIES, len(lows))
        low, high = min(lows[row:last]), max(highs[row:last])
        shared = min(highs[row:last]) if max(lows[row:last]) == low else low
        keys = torch.arange(shared, high, device=first.device)
        visible = (keys >= first[row:last, None]) & (keys < end[row:last, None])
        bias = torch.zeros(visible.shape, dtype=dtype, device=first.device).masked_fill(~visible, -torch.inf)
        blocks.append(QueryBlock(row, last, low, high, shared, bias, end[row:last] - 1))
    return blocks


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[QueryBlock],
    scale: float,
    soft_cap: float,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Many queries of one sequence. q [n, Hq, d]; k, v [Hkv, m, d]; slopes, sinks [Hkv, group]. Returns [n, Hq, d].

    Blocks of QUERIES rows keep the scores in the processor's cache and skip every key that
    no row of the block may see.
    """
    n, heads, d = q.shape
    kv_heads = k.shape[0]
    grouped = q.view(n, kv_heads, -1, d).permute(1, 2, 0, 3) * scale  # [Hkv, group, n, d]
    out = torch.empty_like(grouped)
    for block in blocks:
        rows, keys = slice(block.first_row, block.end_row), slice(block.first_key, block.end_key)
        part = grouped[:, :, rows]
        scores = torch.bmm(part.reshape(kv_heads, -1, d), k[:, keys].transpose(1, 2))
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.view(*part.shape[:3], -1)  # [Hkv, group, rows, keys]
        if slopes is not None:
            distance = torch.arange(block.first_key, block.end_key, device=q.device) - block.places[:, None]
            scores += alibi(slopes, distance, scores.dtype)
        scores[..., block.bias_from - block.first_key :].add_(block.bias)
        weights = softmax(scores, None if sinks is None else sinks[..., None, None])
        out[:, :, rows] = torch.bmm(weights.reshape(kv_heads, -1, scores.shape[-1]), v[:, keys]).view_as(part)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def decode(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, soft_cap: float, sinks: Tensor | None = None
) -> Tensor:
    """One query each of B sequences. q [B, Hq, d]; k, v [Hkv, B, m, d]; bias added to the scores: [B, 1, m],
    or one per query head, [Hkv, B, group, m]; -inf for keys that are not seen. sinks [Hkv, group].

    Returns [B, Hq, d].
    """
    batch, heads, d = q.shape
    grouped = q.view(batch, k.shape[0], -1, d).transpose(0, 1)  # [Hkv, B, group, d]
    scores = torch.matmul(grouped, k.transpose(-1, -2))  # [Hkv, B, group, m]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores * (scale / soft_cap)) + bias
    else:
        scores = torch.add(bias, scores, alpha=scale)
    weights = softmax(scores, None if sinks is None else sinks[:, None, :, None])
    out = torch.matmul(weights, v)  # [Hkv, B, group, d]
    return out.transpose(0, 1).reshape(batch, heads, d)
