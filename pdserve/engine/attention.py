"""Attention over a paged cache: the plain reference, and one fast path per shape of work.

    attend       the reference: every score in memory, softmax in fp32 (or float64)
    prefill      many queries of one sequence: torch's fused kernel
    decode       one query each of many sequences: grouped matrix products. On CPU these beat
                 the fused kernel, which reads every key once per query head

Query head h reads KV head h // (Hq / Hkv); each query sees the keys [first, end).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.dtypes import wide
from pdserve.errors import Internal


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


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, soft_cap: float = 0.0) -> Tensor:
    """softmax(q k^T * scale) v over visible keys.

    q [n, Hq, d]; k, v [Hkv, m, d]; visible bool [n, m]. Returns [n, Hq, d] in q's dtype.
    """
    n, heads, d = q.shape
    accurate = wide(q.dtype)
    grouped = q.view(n, k.shape[0], -1, d).permute(1, 2, 0, 3).to(accurate)  # [Hkv, group, n, d]
    scores = grouped @ k[:, None].to(accurate).transpose(-1, -2) * scale  # [Hkv, group, n, m]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    out = weights @ v[:, None].to(accurate)  # [Hkv, group, n, d]
    return out.permute(2, 0, 1, 3).reshape(n, heads, d).to(q.dtype)


def prefill(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    """As `attend`; visible None means causal from the first key (n == m)."""
    if soft_cap:
        if visible is None:
            visible = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=q.device).tril()
        return attend(q, k, v, visible, scale, soft_cap)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )  # [1, Hq, n, d]
    return out[0].transpose(0, 1)


def decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, soft_cap: float) -> Tensor:
    """One query each of B sequences. q [B, Hq, d]; k, v [Hkv, B, m, d]; bias [B, 1, m], 0 or -inf.

    Returns [B, Hq, d].
    """
    batch, heads, d = q.shape
    grouped = q.view(batch, k.shape[0], -1, d).transpose(0, 1)  # [Hkv, B, group, d]
    scores = torch.matmul(grouped, k.transpose(-1, -2))  # [Hkv, B, group, m]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores * (scale / soft_cap)) + bias
    else:
        scores = torch.add(bias, scores, alpha=scale)
    out = torch.matmul(torch.softmax(scores, -1), v)  # [Hkv, B, group, d]
    return out.transpose(0, 1).reshape(batch, heads, d)
