"""What one step of a model costs, from its ModelSpec alone: shapes, FLOPs, bytes, and the least time it can take.

No torch and no weights. Sources: a matrix product [n, a] x [a, b] is 2 n a b FLOPs; the two products
of attention are 4 B Hq n m d (all n x m scores, masked ones included, as dense kernels compute them);
the bound is t >= max(F / P, M / B) with F in FLOPs, P in FLOP/s, M in bytes, B in bytes/s.

M counts what must cross the memory bus: every weight once, and the K and V that are read or
written. Activations may stay in the processor's caches, so a bound leaves them out; norms,
activations, softmax and rotation are left out of F, where they are far below a percent.

Of a mixture of experts each token computes `active_experts`, and a step reads as many different experts as its tokens
can take: one token's, or all of them where the tokens are many and the router spreads them evenly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.engine.weights import kept
from pdserve.errors import InvalidRequest

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "float64": 8}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """`batch` sequences that each run `tokens` tokens after `cached` ones. One decode step: tokens = 1."""

    batch: int
    tokens: int
    cached: int = 0

    @property
    def keys(self) -> int:
        """Keys that the last query sees."""
        return self.cached + self.tokens

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class Row:
    """One operation; `times` layers have it. FLOPs and bytes are those of one of them."""

    name: str
    shape: Shape  # of the result
    times: int = 1
    flops: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0  # K and V read or written

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Machine:
    """Effective rates, not those of a data sheet."""

    flops: float  # FLOP/s
    bandwidth: float  # bytes/s

    def bound(self, flops: float, bytes_: float) -> Bound:
        return Bound(flops / self.flops, bytes_ / self.bandwidth)


@dataclass(frozen=True)
class Bound:
    """Seconds that a piece of work takes at least."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def binds(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"


@dataclass(frozen=True)
class Ledger:
    """All rows of one step, in the order of execution."""

    spec: ModelSpec
    step: Step
    rows: tuple[Row, ...]

    @property
    def flops(self) -> int:
        return sum(row.times * row.flops for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.times * row.weight_bytes for row in self.rows)

    @property
    def cache_bytes(self) -> int:
        return sum(row.times * row.cache_bytes for row in self.rows)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def cached_scalars(self) -> int:
        """K and V of every sequence after the step."""
        return self.step.batch * self.step.keys * scalars_per_token(self.spec)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def bound(self, machine: Machine) -> Bound:
        """Of the step as a whole: compute and traffic of different rows may overlap."""
        return machine.bound(self.flops, self.bytes)


def scalars_per_token(spec: ModelSpec) -> int:
    """K and V of one token, all layers."""
    return sum(plane.heads * plane.head_dim for layer in spec.planes() for plane in layer)


def ledger(spec: ModelSpec, step: Step, dtype: str = "fp32", kv_dtype: str = "") -> Ledger:
    """The ledger of one step; logits are taken at the last token of each sequence.

    Raises InvalidRequest for a step that the model cannot run.
    """
    check_step(spec, step)
    b, n, width = step.batch, step.tokens, spec.width
    size, kv_size = ITEM_BYTES[dtype], ITEM_BYTES[kv_dtype or dtype]

    def linear(name: str, inputs: int, outputs: int, rows: int, shape: Shape, times: int = 1) -> Row:
        flops, weights = linear_cost(rows, inputs, outputs, size)
        return Row(name, shape, times, flops, weights)

    embed_width = spec.embed_width or width
    rows = [Row("embedding", (b, n, embed_width), weight_bytes=step.rows * embed_width * size)]
    if spec.embed_width:
        rows.append(linear("input projection", embed_width, width, step.rows, (b, n, width)))
    if spec.positions.kind == "learned":
        rows.append(Row("position table", (b, n, width), weight_bytes=n * width * size))
    own = spec.layer_input_width
    if own:
        every = spec.layers * own
        rows.append(Row("embedding of each layer", (b, n, every), weight_bytes=step.rows * every * size))
        rows.append(linear("inputs of each layer", width, every, step.rows, (b, n, every)))
    rows.append(Row("layer input", (b, n, width)))
    rows += _attention(spec, step, size, kv_size)
    mixtures = sum(spec.has_experts(layer) for layer in range(spec.layers))
    rows += _experts(spec, step, size, mixtures) if mixtures else ()
    dense = Counter(spec.ffn_of(i) for i in range(spec.layers) if spec.experts_beside or not spec.has_experts(i))
    for ffn, layers in dense.items():
        suffix = f" ({ffn})" if len(dense) > 1 else ""
        for name in ("gate", "up") if spec.mlp == "gated" else ("up",):
            rows.append(linear(f"{name}{suffix}", width, ffn, step.rows, (b, n, ffn), layers))
        rows.append(linear(f"down{suffix}", ffn, width, step.rows, (b, n, width), layers))
    if own:
        rows.append(linear("own input gate", width, own, step.rows, (b, n, own), spec.layers))
        rows.append(linear("own input projection", own, width, step.rows, (b, n, width), spec.layers))
    rows.append(Row("layer output", (b, n, width)))
    last = (b, 1, width)
    if spec.out_width:
        last = (b, 1, spec.out_width)
        rows.append(linear("output projection", width, spec.out_width, b, last))
    rows.append(Row("last position", last))
    rows.append(linear("logits", last[-1], spec.vocab_size, b, (b, spec.vocab_size)))
    return Ledger(spec, step, tuple(rows))


def linear_cost(rows: int, inputs: int, outputs: int, item_bytes: int) -> tuple[int, int]:
    """(FLOPs, weight bytes) of [rows, inputs] x [inputs, outputs]."""
    return 2 * rows * inputs * outputs, inputs * outputs * item_bytes


def check_step(spec: ModelSpec, step: Step) -> None:
    for name, least in (("batch", 1), ("tokens", 1), ("cached", 0)):
        if getattr(step, name) < least:
            raise InvalidRequest(f"{getattr(step, name)} is not allowed", field=name, remedy=f"use at least {least}")
    if step.keys > spec.context_limit:
        raise InvalidRequest(
            f"{step.keys} tokens are more than the context of {spec.context_limit}",
            reason="PROMPT_TOO_LONG",
            field="prompt",
            remedy=f"use at most {spec.context_limit}",
        )


def _attention(spec: ModelSpec, step: Step, size: int, kv_size: int) -> Iterable[Row]:
    """Projections, scores, weighted sum and output, of one layer of each kind."""
    kinds: dict[tuple[LayerShape, tuple[str, ...]], list[int]] = {}
    for layer in range(spec.layers):
        kinds.setdefault((spec.shape_of(layer), kept(spec, layer)), []).append(layer)
    for (shape, made), layers in kinds.items():
        suffix = f" ({shape.heads}/{shape.kv_heads} x {shape.head_dim})" if len(kinds) > 1 else ""
        yield from _attention_of(spec, step, size, kv_size, shape, made, layers, suffix)


def _attention_of(
    spec: ModelSpec, step: Step, size: int, kv_size: int, shape: LayerShape, made: tuple[str, ...],
    layers: list[int], suffix: str,
) -> Iterable[Row]:  # fmt: skip
    """Of layers of one shape that make the same of k and v."""
    if shape.kernel:
        yield from _convolution(spec, step, size, kv_size, shape, len(layers))
        return
    b, n, d, heads, times = step.batch, step.tokens, shape.head_dim, shape.heads, len(layers)
    query, key = (b, heads, n, d), (b, shape.kv_heads, n, d)
    if shape.kv_heads:
        flops, weights = linear_cost(step.rows, spec.width, heads * d, size)
        yield Row(f"query{suffix}", query, times, flops, weights)
    for name, product in (("key", "k"), ("value", "v")) if made else ():
        flops, weights = linear_cost(step.rows, spec.width, key[1] * d, size) if product in made else (0, 0)
        yield Row(f"{name}{suffix}", key, times, flops, weights, math.prod(key) * kv_size)
    # A layer with a window reads and scores no more than the window of each query.
    for keys, windows in sorted(_visible(spec, step, layers).items(), reverse=True) if shape.kv_heads else ():
        kind = suffix if keys == step.keys else f"{suffix} (window {keys})"
        flops, read = 2 * b * heads * n * keys * d, b * shape.kv_heads * keys * d * kv_size
        yield Row(f"scores{kind}", (b, heads, n, keys), windows, flops, cache_bytes=read)
        yield Row(f"weighted sum{kind}", query, windows, flops, cache_bytes=read)
    if heads:
        flops, weights = linear_cost(step.rows, heads * d, spec.width, size)
        yield Row(f"attention output{suffix}", (b, n, spec.width), times, flops, weights)


def _convolution(spec: ModelSpec, step: Step, size: int, kv_size: int, shape: LayerShape, times: int) -> Iterable[Row]:
    """Short convolutions: each row reads those of the tokens before it, and keeps its own."""
    b, n, width, kernel = step.batch, step.tokens, shape.head_dim, shape.kernel
    for name, inputs, outputs in (("convolution in", spec.width, 3 * width), ("convolution out", width, spec.width)):
        flops, weights = linear_cost(step.rows, inputs, outputs, size)
        yield Row(name, (b, n, outputs), times, flops, weights)
    moved = b * (n + min(step.keys, n + kernel - 1)) * width * kv_size
    yield Row("convolution", (b, n, width), times, 2 * b * n * width * kernel, width * kernel * size, moved)


def _experts(spec: ModelSpec, step: Step, size: int, times: int) -> Iterable[Row]:
    """Router and experts, of one layer each; a result of an expert's row stands `active_experts` times in the shape."""
    b, n, active = step.batch, step.tokens, spec.active_experts
    read = min(spec.experts, step.rows * active)
    flops, weights = linear_cost(step.rows, spec.width, spec.experts, size)
    yield Row("router", (b, n, spec.experts), times, flops, weights)
    for name, inputs, outputs in (
        ("expert gate", spec.width, spec.expert_width),
        ("expert up", spec.width, spec.expert_width),
        ("expert down", spec.expert_width, spec.width),
    ):
        flops, weights = linear_cost(step.rows * active, inputs, outputs, size)
        yield Row(name, (b, n, active, outputs), times, flops, weights * read)
    if spec.shared_width:
        for name, inputs, outputs in (
            ("shared expert's gate", spec.width, 1),
            ("shared expert gate", spec.width, spec.shared_width),
            ("shared expert up", spec.width, spec.shared_width),
            ("shared expert down", spec.shared_width, spec.width),
        ):
            flops, weights = linear_cost(step.rows, inputs, outputs, size)
            yield Row(name, (b, n, outputs), times, flops, weights)


def _visible(spec: ModelSpec, step: Step, layers: Iterable[int]) -> dict[int, int]:
    """Keys a layer has to read -> number of such layers."""
    found: dict[int, int] = {}
    for layer in layers:
        window = spec.window(layer)
        keys = min(step.keys, window + step.tokens - 1) if window else step.keys
        found[keys] = found.get(keys, 0) + 1
    return found
