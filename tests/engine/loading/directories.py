"""Hugging Face directories, changed in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.loading import peers

ABSENT = object()


def directory(path: Path, name: str = "llama", **save: Any) -> Path:
    return peers.save_peer(peers.make_peer(name), path / "model", **save)


def edit_json(path: Path, changes: Mapping[str, Any], file: str = "config.json") -> None:
    """Sets keys of a JSON object; ABSENT removes one."""
    target = path / file
    values = {**json.loads(target.read_text()), **changes}
    target.write_text(json.dumps({key: value for key, value in values.items() if value is not ABSENT}))


def edit_tensors(path: Path, changes: Mapping[str, Tensor | None], file: str = "model.safetensors") -> None:
    """Sets tensors; None removes one."""
    target = path / file
    values = {name: tensor.clone() for name, tensor in load_file(target).items()} | dict(changes)
    save_file({name: tensor for name, tensor in values.items() if tensor is not None}, target)


def truncate(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])
