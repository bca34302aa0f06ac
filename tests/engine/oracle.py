"""A second decoder, written apart from the engine: one sequence, no cache, one position at a time.

Nothing here is imported from the engine but the spec and the canonical tensors, so a fault
in the engine cannot hide in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.spec import ModelSpec


def logits(model: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Raw scores at every position, [n, vocab_size] in float64."""
    s, t = model.spec, {name: tensor.double() for name, tensor in model.tensors.items()}
    xs = [_embed(s, t, token, position) for position, token in enumerate(ids)]
    embedded, kept = xs, Kept()
    for layer in range(s.layers):
        xs = _layer(s, t, layer, xs, kept)
        xs = [_finished(s, t, layer, x, token, first) for x, token, first in zip(xs, ids, embedded, strict=True)]
    rows = []
    for x in xs:
        if s.final_norm:
            x = _norm(s, t, "final_norm", x)
        if s.out_width:
            x = _affine(t, "out_proj", x)
        head = t["embed"] if s.tied_head else t["head.weight"]
        row = (head @ x + (t["head.bias"] if s.head_bias else 0.0)) * s.logit_scale
        rows.append(_cap(s.logit_soft_cap, row))
    return torch.stack(rows)


def _embed(s: ModelSpec, t: Mapping[str, Tensor], token: int, position: int) -> Tensor:
    x = t["embed"][token] * s.embed_scale
    if s.embed_width:
        x = _affine(t, "in_proj", x)
    if s.positions.kind == "learned":
        x = x + t["pos"][position]
    return _norm(s, t, "embed_norm", x) if s.embed_norm else x


def _finished(s: ModelSpec, t: Mapping[str, Tensor], layer: int, x: Tensor, token: int, embedded: Tensor) -> Tensor:
    """What a layer gives, with what it adds of the token itself, times its factor."""
    p, width = f"layers.{layer}.", s.layer_input_width
    if width:
        own = slice(layer * width, (layer + 1) * width)
        context = _norm(s, t, "layer_in_norm", t["layer_in.weight"][own] @ embedded / math.sqrt(len(embedded)))
        inputs = (context + t["layer_embed"][token][own] * math.sqrt(width)) / math.sqrt(2)
        x = x + _norm(
            s,
            t,
            p + "input_norm",
            _affine(t, p + "input_proj", _act(s.activation, _affine(t, p + "input_gate", x)) * inputs),
        )
    return x * t[p + "layer_scale.scale"] if s.layer_scale else x


Kept = dict[int, tuple[list[Tensor], list[Tensor]]]


def _layer(s: ModelSpec, t: Mapping[str, Tensor], layer: int, xs: list[Tensor], kept: Kept) -> list[Tensor]:
    p = f"layers.{layer}."
    before = s.norm_order in ("pre", "sandwich")
    norm = p + "attn_norm" if s.shape_of(layer).heads else ""
    inputs = [_norm(s, t, norm, x) if before and norm else x for x in xs]
    attended_rows = _attention(s, t, layer, p, inputs, kept)
    outputs = []
    for x, attended in zip(xs, attended_rows, strict=True):
        mlp = _beside if s.experts_beside else _experts if s.has_experts(layer) else _mlp
        if s.norm_order == "post":
            y = _norm(s, t, p + "attn_norm", x + attended * s.residual_scale)
            outputs.append(_norm(s, t, p + "mlp_norm", y + mlp(s, t, p, y) * s.residual_scale))
            continue
        after = s.norm_order in ("branch", "sandwich")
        y = x + (_norm(s, t, p + "attn_out_norm", attended) if after else attended) * s.residual_scale
        if not s.ffn_of(layer) and not s.has_experts(layer):
            outputs.append(y)
            continue
        z = x if s.parallel else y
        name = "attn_norm" if s.one_norm else "mlp_norm"
        added = mlp(s, t, p, z if s.experts_beside or not before else _norm(s, t, p + name, z))
        outputs.append(y + (_norm(s, t, p + "mlp_out_norm", added) if after else added) * s.residual_scale)
    return outputs


def _attention(
    s: ModelSpec, t: Mapping[str, Tensor], layer: int, p: str, inputs: list[Tensor], kept: Kept
) -> list[Tensor]:
    """What attention, or what stands in its place, adds at every position."""
    shape, scheme = s.shape_of(layer), s.positions_of(layer)
    if not shape.heads:
        return [torch.zeros_like(h) for h in inputs]
    if not shape.kv_heads:
        return [_affine(t, p + "o", h) for h in inputs]
    if shape.kernel:
        return _convolve(t, p, shape.kernel, inputs)
    d = shape.head_dim
    q = [_heads(s, t, p + "q", h, shape.heads, d, position, scheme) for position, h in enumerate(inputs)]
    if not s.kv_layers or s.kv_layers[layer] == layer:
        values = p + ("k" if layer in s.key_is_value else "v")
        k = [_heads(s, t, p + "k", h, shape.kv_heads, d, position, scheme) for position, h in enumerate(inputs)]
        v = [_affine(t, values, h).reshape(shape.kv_heads, d) for h in inputs]
        if s.v_norm:
            v = [row / torch.sqrt((row * row).mean(1, keepdim=True) + s.norm_eps) for row in v]
        kept[layer] = k, v
    k, v = kept[s.kv_layers[layer] if s.kv_layers else layer]
    own = [h * shape.kv_heads // shape.heads for h in range(shape.heads)]
    rows = []
    for i in range(len(inputs)):
        heads = [
            _attend(s, layer, i, h, q[i][h], [row[own[h]] for row in k], [row[own[h]] for row in v], _sink(s, t, p, h))
            for h in range(shape.heads)
        ]
        rows.append(_affine(t, p + "o", torch.cat(heads)))
    return rows


def _convolve(t: Mapping[str, Tensor], p: str, kernel: int, inputs: list[Tensor]) -> list[Tensor]:
    """Every channel by itself: the tokens up to one, the latest by the filter's last tap."""
    gates = [_affine(t, p + "conv_in", h).reshape(3, -1) for h in inputs]
    rows = []
    for i, (_, out_gate, _) in enumerate(gates):
        total = torch.zeros_like(out_gate)
        for distance in range(min(kernel, i + 1)):
            in_gate, _, x = gates[i - distance]
            total = total + t[p + "conv.weight"][:, kernel - 1 - distance] * in_gate * x
        rows.append(_affine(t, p + "conv_out", out_gate * (total + t.get(p + "conv.bias", 0.0))))
    return rows


def _sink(s: ModelSpec, t: Mapping[str, Tensor], p: str, head: int) -> float:
    return float(t[p + "sinks"][head]) if s.attention_sinks else -math.inf


def _attend(
    s: ModelSpec, layer: int, i: int, head: int, q: Tensor, ks: list[Tensor], vs: list[Tensor], sink: float
) -> Tensor:
    window = s.window(layer)
    seen = [j for j in range(i + 1) if not window or i - j < window]
    scores = [float(q @ ks[j]) * (s.attention_scale or len(q) ** -0.5) for j in seen]
    if s.soft_cap:
        scores = [s.soft_cap * math.tanh(score / s.soft_cap) for score in scores]
    if s.positions.kind == "alibi":
        scores = [score - _slope(head, s.heads) * (i - j) for score, j in zip(scores, seen, strict=True)]
    weights = [math.exp(score - max(scores)) for score in scores]
    whole = sum(weights) + math.exp(sink - max(scores))
    total = torch.zeros_like(vs[0])
    for weight, j in zip(weights, seen, strict=True):
        total = total + weight / whole * vs[j]
    return total


def _slope(head: int, heads: int) -> float:
    """ALiBi's slopes as its authors compute them, recursively."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return float(start * start**head)
    lower = 2 ** math.floor(math.log2(heads))
    return _slope(head, lower) if head < lower else _slope(2 * (head - lower), 2 * lower)


def _cap(cap: float, x: Tensor) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _heads(
    s: ModelSpec,
    t: Mapping[str, Tensor],
    name: str,
    h: Tensor,
    heads: int,
    d: int,
    position: int,
    scheme: PositionScheme,
) -> Tensor:
    rows = _affine(t, name, h).reshape(heads, d)
    if s.qk_norm and s.qk_norm_whole:
        rows = rows / torch.sqrt((rows * rows).mean() + s.norm_eps) * t[name + "_norm.scale"].reshape(rows.shape)
    elif s.qk_norm and s.qk_norm_each:
        rows = rows - rows.mean(1, keepdim=True)
        spread = torch.sqrt((rows * rows).mean(1, keepdim=True) + s.norm_eps)
        rows = rows / spread * (t[name + "_norm.scale"] + s.norm_offset)
    elif s.qk_norm:
        scale = t[name + "_norm.scale"] + s.norm_offset
        rows = torch.stack([row / torch.sqrt((row * row).mean() + s.norm_eps) * scale for row in rows])
    return torch.stack([_rotate(scheme, row, position) for row in rows])


def _rotate(scheme: PositionScheme, row: Tensor, position: int) -> Tensor:
    if scheme.kind != "rope":
        return row
    half, out = scheme.dims // 2, row.clone()
    for pair in range(half):
        angle = position * _frequency(scheme, pair)
        a, b = row[pair], row[pair + half]
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _frequency(scheme: PositionScheme, pair: int) -> float:
    plain: float = scheme.theta ** (-2 * pair / scheme.dims)
    if scheme.scaling == "none":
        return plain
    options, turns = dict(scheme.scaling_parameters), scheme.original_max_positions * plain / (2 * math.pi)
    if scheme.scaling == "linear":
        return plain / options["factor"]
    if scheme.scaling == "proportional":
        return plain / options["factor"] if pair < options["rotated"] else 0.0
    if turns < options["low_freq_factor"]:
        return plain / options["factor"]
    if turns > options["high_freq_factor"]:
        return plain
    share = (turns - options["low_freq_factor"]) / (options["high_freq_factor"] - options["low_freq_factor"])
    return (1 - share) * plain / options["factor"] + share * plain


def _mlp(s: ModelSpec, t: Mapping[str, Tensor], p: str, z: Tensor) -> Tensor:
    if s.mlp == "plain":
        return _affine(t, p + "down", _act(s.activation, _affine(t, p + "up", z)))
    return _affine(t, p + "down", _act(s.activation, _affine(t, p + "gate", z)) * _affine(t, p + "up", z))


def _beside(s: ModelSpec, t: Mapping[str, Tensor], p: str, y: Tensor) -> Tensor:
    """An MLP and experts, both of y."""
    dense = _norm(s, t, p + "beside_mlp_norm", _mlp(s, t, p, _norm(s, t, p + "mlp_norm", y)))
    routed = y / torch.sqrt((y * y).mean() + s.norm_eps) * t[p + "router_norm.scale"] / math.sqrt(len(y))
    return dense + _norm(s, t, p + "beside_out_norm", _experts(s, t, p, _norm(s, t, p + "beside_norm", y), routed))


def _experts(s: ModelSpec, t: Mapping[str, Tensor], p: str, z: Tensor, routed: Tensor | None = None) -> Tensor:
    raw = [float(score) for score in _affine(t, p + "router", z if routed is None else routed)]
    scores = [1 / (1 + math.exp(-score)) if s.sigmoid_router else math.exp(score) for score in raw]
    added = t[p + "router_correction.bias"].tolist() if s.sigmoid_router else [0.0] * s.experts
    best = sorted(range(s.experts), key=lambda e: -scores[e] - added[e])[: s.active_experts]
    total = sum(scores[e] for e in best) if s.norm_experts else sum(scores)
    out, kinds = torch.zeros_like(z), ("weight", "bias") if s.expert_bias else ("weight",)
    for e in best:
        own = {f"{n}.{k}": t[f"{p}expert_{n}.{k}"][e] for n in ("gate", "up", "down") for k in kinds}
        gate, up = _affine(own, "gate", z), _affine(own, "up", z)
        inner = _swiglu(s, gate, up) if s.swiglu_limit else _act(s.activation, gate) * up
        gain = float(t[p + "expert_gains.scale"][e]) if s.experts_beside else 1.0
        out = out + gain * scores[e] / total * _affine(own, "down", inner)
    if not s.shared_width:
        return out
    share = 1 / (1 + math.exp(-float(t[p + "shared_router.weight"][0] @ z)))
    inner = _act(s.activation, t[p + "shared_gate.weight"] @ z) * (t[p + "shared_up.weight"] @ z)
    return out + share * (t[p + "shared_down.weight"] @ inner)


def _swiglu(s: ModelSpec, gate: Tensor, up: Tensor) -> Tensor:
    rows = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        g, u = min(g, s.swiglu_limit), max(-s.swiglu_limit, min(u, s.swiglu_limit))
        rows.append((u + 1) * g / (1 + math.exp(-s.swiglu_alpha * g)))
    return torch.tensor(rows, dtype=gate.dtype)


def _act(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if name == "relu2":
        return torch.where(x > 0, x * x, torch.zeros_like(x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _norm(s: ModelSpec, t: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if s.norm == "layer":
        x = x - x.mean()
    x = x / torch.sqrt((x * x).mean() + s.norm_eps)
    if s.norm_scale:
        x = x * (t[name + ".scale"] + s.norm_offset)
    return x + t[name + ".shift"] if s.norm_shift else x


def _affine(t: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = t[name + ".weight"] @ x
    return y + t[name + ".bias"] if name + ".bias" in t else y
