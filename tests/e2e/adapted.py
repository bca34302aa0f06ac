"""A base model with three adapters, made with the peer library, and what the peer library answers with each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.client import Completion
from pdserve.engine.adapter_files import load_adapter
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig
from pdserve.request import SamplingParams
from tests.decode_worker.small_bundle import LETTERS
from tests.e2e.stack import MODEL, Stack, stack
from tests.engine import lora
from tests.engine.loading import peers

VOCAB = len(LETTERS)
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# crimson is another version of red: it may take its name.
_ADAPTERS: dict[str, dict[str, Any]] = {
    "red": {"target_modules": [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "crimson": {"target_modules": [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "blue": {"target_modules": ["q_proj", "down_proj"], "r": 2, "use_rslora": True},
}


@dataclass
class Adapted:
    """`root` holds a directory for each adapter, named as it."""

    peer: Any
    base: LoadedModel
    root: Path
    _answers: dict[tuple[str | None, tuple[int, ...], int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def made(cls, path: Path) -> Adapted:
        peer = lora.make_adapted("llama", _ADAPTERS, vocab_size=VOCAB, max_position_embeddings=256)
        plain = peers.make_peer("llama", vocab_size=VOCAB, max_position_embeddings=256)
        base = load_model(peers.save_peer(plain, path / "base"), "fp32")
        for name in _ADAPTERS:
            lora.save_adapter(peer, name, path / "adapters")
        return cls(peer, base, path / "adapters")

    def engine(self, **config: Any) -> Engine:
        given = {"dtype": "fp32", "pages": 128, "page_size": 4, "kernels": "plain", **config}
        own = LoadedModel(**{**vars(self.base), "tensors": dict(self.base.tensors)})
        return Engine(own, EngineConfig(**given))

    def path(self, name: str) -> str:
        return str(self.root / name)

    def answer(self, ids: Sequence[int], adapter: str | None, count: int) -> tuple[int, ...]:
        """The peer's greedy tokens."""
        key = (adapter, tuple(ids), count)
        if key not in self._answers:
            self._answers[key] = lora.greedy(self.peer, ids, adapter, count)
        return self._answers[key]

    def digest(self, name: str) -> bytes:
        return load_adapter(self.path(name), self.engine().base).digest

    def logits(self, ids: Sequence[int], adapter: str | None) -> Tensor:
        """The peer's raw scores at the last position."""
        return lora.logits(self.peer, ids, adapter)[-1]


def prompt(length: int, seed: int = 5) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(0, VOCAB, (length,), generator=generator))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@asynccontextmanager
async def serving(
    made: Adapted,
    *names: str,
    pairs: int = 1,
    worker: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A router and `pairs` of workers that serve these adapters, under their own names, from the start."""
    given = {
        "adapters": {name: made.path(name) for name in names},
        "adapter_root": str(made.root),
        **(worker or {}),
    }
    async with stack(**settings) as it:
        for _ in range(pairs):
            await it.add_prefill(made.engine(**(engine or {})), **given)
            await it.add_decode(made.engine(**(engine or {})), **given)
        yield it


async def ask(it: Stack, ids: Sequence[int], adapter: str | None, count: int, **options: Any) -> Completion:
    return await it.ask(ids, greedy(count), model=MODEL, adapter=adapter or "", **options)


async def all_of(*work: Any) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]
