"""One torch thread for tiny models, and the tiny models as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.engine.checkpoint import save_spec_checkpoint
from tests.engine.loading.peers import make_peer, save_peer
from tests.engine.tiny import tiny_model


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the engine's tests as a checkpoint file, without a tokenizer."""
    model = tiny_model()
    path = tmp_path_factory.mktemp("tiny") / "tiny.pdmodel"
    save_spec_checkpoint(path, model.spec, model.tensors)
    return path


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face directory: four query heads, two KV heads, three layers."""
    return save_peer(make_peer("llama"), tmp_path_factory.mktemp("llama") / "model")
