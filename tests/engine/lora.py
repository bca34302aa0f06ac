"""LoRA checkpoints made with the peer library, for tiny base models made with the peer library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from tests.engine.loading import peers

SPREAD = 0.15  # of both factors: enough that every adapter moves the logits by far more than the tolerance


def make_adapted(base: str, adapters: Mapping[str, Mapping[str, Any]], seed: int = 3, **of_base: Any) -> Any:
    """A peer model with adapters of these names and options, both factors random; `of_base`: options of the model."""
    model: Any = None
    for name, options in adapters.items():
        given = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
        config = peft.LoraConfig(fan_in_fan_out=base.startswith("gpt2"), **given)
        with peer_warnings():
            if model is None:
                model = peft.get_peft_model(peers.make_peer(base, **of_base), config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    return model.eval()


def save_adapter(model: Any, name: str, path: Path) -> Path:
    """The directory of one adapter, as the peer library writes it."""
    with peer_warnings():
        model.save_pretrained(path, selected_adapters=[name])
    return path if name == "default" else path / name


def logits(model: Any, ids: Sequence[int], adapter: str | None) -> Tensor:
    """[len(ids), vocab]: the peer's logits at every position with an adapter, or (None) without any."""
    if adapter is None:
        with model.disable_adapter():
            return peers.peer_logits(model, ids)
    model.set_adapter(adapter)
    return peers.peer_logits(model, ids)


def greedy(model: Any, ids: Sequence[int], adapter: str | None, count: int) -> tuple[int, ...]:
    """The tokens that the peer would give, one by one."""
    held = list(ids)
    for _ in range(count):
        held.append(int(logits(model, held, adapter)[-1].argmax()))
    return tuple(held[len(ids) :])


@contextmanager
def peer_warnings() -> Iterator[None]:
    """The peer library uses what its own peer has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
