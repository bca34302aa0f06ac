"""Checkpoints and engines of a comparison, each loaded once."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model, model_path
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError
from pdserve.tokenizer import Bundle, load_bundle
from pdserve.verify.sides import Side

E = TypeVar("E", bound=Engine)


class Models:
    """Keeps what it loaded for as long as it lives."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str, str], LoadedModel] = {}

    def load(self, side: Side) -> LoadedModel:
        """Raises CheckpointError, ConfigError."""
        key = side.model, side.engine.dtype, side.engine.device
        if key not in self._loaded:
            _check_device(side.engine.device)
            self._loaded[key] = load_model(model_path(side.model), side.engine.dtype, side.engine.device)
        return self._loaded[key]

    def engine(self, side: Side, pages: int, kind: type[E]) -> E:
        """A fresh engine: an empty cache, and a mapping of its own of the shared weights."""
        model, config = self.load(side), replace(side.engine, pages=pages)
        return kind(replace(model, tensors=dict(model.tensors)), config)

    def bundle(self, side: Side) -> Bundle | None:
        return load_bundle(model_path(side.model))


def pages_for(tokens: int, config: EngineConfig) -> int:
    return -(-tokens // config.page_size)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device
        raise ConfigError(
            f"this machine has no device {name!r}", field="device", remedy="use device:cpu, or another build of torch"
        ) from error
