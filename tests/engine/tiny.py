"""Tiny models for tests: no checkpoint file, known weights, large enough spread to show a fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from cache_transfer.encoding import sha256
from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.engine import Engine
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepCounters, StepOutput, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import expected_tensors

ROPE = PositionScheme(kind="rope", theta=10000.0, dims=8)
TINY = ModelSpec(
    vocab_size=97, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_width=48, context_limit=512, positions=ROPE
)  # fmt: skip
SEVEN = ModelSpec(
    vocab_size=6, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_width=16, context_limit=64,
    positions=PositionScheme(kind="learned", dims=64), norm_eps=1e-6, norm_scale=False,
)  # fmt: skip


def spec(**changes: Any) -> ModelSpec:
    """TINY with some fields changed."""
    return replace(TINY, **changes)


def tiny_model(of: ModelSpec = TINY, dtype: str = "fp32", seed: int = 0, spread: float = 0.25) -> LoadedModel:
    """A model with normal weights of the given spread; scales and shifts around 1 and 0.

    The digest is over spec, seed and spread, so it is the same for every dtype, as a real one.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(of).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        if name.endswith(".scale"):
            values += 1.0
        tensors[name] = values.to(torch_dtype(dtype))
    return LoadedModel("tiny", of, tensors, dtype, sha256("tiny", (of, seed, spread)))


def seven_model(dtype: str = "float64") -> LoadedModel:
    """The decoder of spec B: every weight from random.Random(7), uniform in [-0.2, 0.2]."""
    draw = random.Random(7)

    def matrix(rows: int, columns: int) -> Tensor:
        values = [[draw.uniform(-0.2, 0.2) for _ in range(columns)] for _ in range(rows)]
        return torch.tensor(values, dtype=torch.float64)

    tensors = {"embed": matrix(6, 8), "pos": matrix(64, 8)}
    for layer in range(2):
        shapes = (("q", 8, 8), ("k", 8, 4), ("v", 8, 4), ("o", 8, 8), ("gate", 8, 16), ("up", 8, 16), ("down", 16, 8))
        for name, rows, columns in shapes:  # drawn as [inputs, outputs]
            tensors[f"layers.{layer}.{name}.weight"] = matrix(rows, columns).T.contiguous()
    tensors["head.weight"] = matrix(8, 6).T.contiguous()
    tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
    return LoadedModel("seven", SEVEN, tensors, dtype, sha256("tiny", "random-7"))


def tiny_engine(of: ModelSpec = TINY, dtype: str = "fp32", seed: int = 0, **config: Any) -> Engine:
    settings = {"pages": 64, "page_size": 4, "kernels": "plain", **config}
    return Engine(tiny_model(of, dtype, seed), EngineConfig(dtype=dtype, **settings))


def prompt(length: int, seed: int = 0, vocab: int = 97) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab) for _ in range(length))


def run(engine: Engine, *chunks: Chunk) -> StepOutput:
    return engine.step(StepPlan(chunks))


def greedy(
    engine: Engine, ids: Sequence[int], pages: Sequence[int], count: int, chunk: int = 10**9
) -> tuple[list[int], list[Tensor], StepCounters]:
    """Prefill in chunks, then one token at a time: (output ids, logits of each step, work)."""
    held, counters = list(ids), StepCounters()
    outputs: list[int] = []
    logits: list[Tensor] = []
    start = 0
    while len(outputs) < count:
        end = min(len(held), start + chunk)
        out = run(engine, Chunk("r", tuple(held[start:end]), start, tuple(pages)))
        counters += out.counters
        start = end
        if end == len(held):
            logits.append(out.logits["r"][0])
            outputs.append(int(out.logits["r"][0].argmax()))
            held.append(outputs[-1])
    return outputs, logits, counters
