"""The shapes of caches whose transfer is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache_transfer.contract import (
    AttentionScheme,
    CachePlane,
    HandoffIdentity,
    PositionScheme,
    WorkerContract,
    prompt_digest,
)
from pdserve.engine.plan import EngineConfig
from pdserve.engine.spec import ModelSpec

VOCAB = 32000


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    heads: int
    head_dim: int
    tokens: int
    send_order: str = "hnd"
    take_order: str = "hnd"
    take_page_size: int = 16

    @property
    def payload_bytes(self) -> int:
        return self.layers * 2 * self.tokens * self.heads * self.head_dim * 2  # bf16

    def spec(self) -> ModelSpec:
        positions = PositionScheme("rope", 10000.0, self.head_dim)
        width = self.heads * self.head_dim
        return ModelSpec(
            vocab_size=VOCAB,
            width=width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            ffn_width=width,
            context_limit=self.tokens,
            positions=positions,
        )

    def config(self, order: str, page_size: int) -> EngineConfig:
        return EngineConfig(dtype="bf16", pages=-(-self.tokens // page_size), page_size=page_size, axis_order=order)

    def contract(self, order: str, page_size: int) -> WorkerContract:
        return WorkerContract(
            model_digest=bytes(32),
            positions=self.spec().positions,
            attention=AttentionScheme(self.head_dim**-0.5),
            planes=((CachePlane("k", self.heads, self.head_dim), CachePlane("v", self.heads, self.head_dim)),)
            * self.layers,
            vocab_size=VOCAB,
            tokenizer_digest=b"",
            page_size=page_size,
            page_axis_order=order,
            device="cpu",
            kv_dtype="bf16",
            weight_dtype="bf16",
            activation_dtype="bf16",
        )

    def identity(self) -> HandoffIdentity:
        digest = self.contract(self.take_order, self.take_page_size).digest()
        return HandoffIdentity(digest, None, "benchmark", prompt_digest(()), 0, self.tokens)

    def pages(self, page_size: int) -> list[int]:
        """A scattered block table, as after a while of serving."""
        count = -(-self.tokens // page_size)
        return torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()


CASES = (
    Case("8B model, 8 heads of 128, 1 MiB frames", layers=32, heads=8, head_dim=128, tokens=1024),
    Case("same, nhd pages on both sides", 32, 8, 128, 1024, send_order="nhd", take_order="nhd"),
    Case("same, hnd/16 into nhd/32 pages", 32, 8, 128, 1024, take_order="nhd", take_page_size=32),
    Case("SmolLM2, 3 heads of 64, 2048 tokens", layers=30, heads=3, head_dim=64, tokens=2048),
)
