"""A prefill side driven by hand for a decode worker's tests: an engine, and what it hands over."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache_transfer.contract import WorkerContract
from pdserve.engine.blocks import BlockManager
from pdserve.engine.engine import Engine
from pdserve.engine.handover import SequenceSource
from pdserve.engine.plan import Chunk, StepCounters, StepPlan


@dataclass
class Computed:
    """A prompt's cache and raw logits at its last token."""

    ids: tuple[int, ...]
    source: SequenceSource
    dtype: str
    logits: bytes
    counters: StepCounters


class Prefill:
    """Computes prompts on an engine of its own; pages are never reused."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks = BlockManager(engine.config.pages, engine.config.page_size)
        self.contract: WorkerContract = engine.contract()

    def compute(self, ids: Sequence[int]) -> Computed:
        pages = self.blocks.allocate(secrets.token_hex(4), self.blocks.pages_for(len(ids)))
        out = self.engine.step(StepPlan((Chunk("p", tuple(ids), 0, pages),)))
        row = out.logits["p"][-1]
        dtype = "float64" if row.dtype == torch.float64 else "fp32"
        source = SequenceSource(self.engine.cache, pages, 0, len(ids))
        return Computed(tuple(ids), source, dtype, row.numpy().tobytes(), out.counters)
