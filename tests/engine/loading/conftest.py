"""Settings of every test in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.engine.checkpoint import save_spec_checkpoint
from tests.engine.loading.kept import next_tick
from tests.engine.tiny import tiny_model


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose much when they wait for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model on disk whose digests may be kept at once."""
    path = tmp_path / "tiny.pdmodel"
    model = tiny_model()
    save_spec_checkpoint(path, model.spec, model.tensors)
    next_tick(tmp_path)
    return path
