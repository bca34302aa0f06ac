"""Tiny random models made with the peer library, and our engine run over the same checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from tests.engine.loading.peer_rows import GROUPED, PEERS, SIZED, SIZES, SPREAD, VOCAB

TOLERANCE = 1e-4  # absolute, of fp32 logits
PAGE = 4
NAMES = tuple(PEERS)


def make_peer(name: str, **options: Any) -> Any:
    """A tiny model in evaluation mode, every parameter random: norms and biases too."""
    config_class, model_class, own = PEERS[name]
    sizes = SIZES.get(config_class, GROUPED)
    given = {key: value for key, value in {**sizes, **own, **options}.items() if value is not None or key not in SIZED}
    config = getattr(transformers, config_class)(**given)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "ln_" in key or key.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
            if name.startswith("gemma4") and key.endswith("q_norm.weight"):
                parameter.mul_(0.3)  # its scores are not divided by the head dim's root; large ones enlarge rounding
            if key.endswith("bias"):
                parameter.normal_(0.0, SPREAD)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.normal_(0.0, SPREAD)
            if key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(0.0, SPREAD)  # zeros would hide what is wrong with that id
    return model


def save_peer(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def prompt(length: int, seed: int = 5) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(0, VOCAB, (length,), generator=generator))


def peer_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab]: the peer's logits at every position, in one pass."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def new_engine(
    model: LoadedModel, pages: int = 32, page_size: int = PAGE, kernels: str = "auto", deterministic: bool = False
) -> Engine:
    """An engine of its own: it may rearrange the tensors, so it gets its own mapping."""
    own = dataclasses.replace(model, tensors=dict(model.tensors))
    config = EngineConfig(
        dtype=model.dtype, pages=pages, page_size=page_size, kernels=kernels, deterministic=deterministic
    )
    return Engine(own, config)


def engine_logits(
    engine: Engine,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    before_chunk: Callable[[int], None] = lambda start: None,
    beside: bool = False,
) -> Tensor:
    """[len(ids), vocab]: our logits at every position, the ids run in chunks that end at `cuts`.

    beside: another sequence of the same lengths runs in the same steps.
    """
    pages = tuple(reversed(range(engine.config.pages)))  # not the identity: block tables must be followed
    others, pages = (pages[len(pages) // 2 :], pages[: len(pages) // 2]) if beside else ((), pages)
    rows = []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        before_chunk(start)
        used = pages[: -(-end // engine.config.page_size)]
        chunks = [Chunk("s", tuple(ids[start:end]), start, used, logits="all")]
        if beside:
            chunks.insert(0, Chunk("other", tuple(VOCAB - 1 - i for i in ids[start:end]), start, others[: len(used)]))
        rows.append(engine.step(StepPlan(tuple(chunks))).logits["s"])
    return torch.cat(rows)


def load_logits(path: Path, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
    return engine_logits(new_engine(load_model(path, "fp32")), ids, cuts)


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
