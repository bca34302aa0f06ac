"""A model's digest is its content: not its place, split, or the dtype it is loaded in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdserve.engine.load import load_model
from tests.engine.loading import peers
from tests.engine.loading.directories import directory, edit_json, edit_tensors
from tests.engine.loading.gguf_writing import write_gguf

NORM = "model.layers.2.input_layernorm.weight"


def digest(path: Path, dtype: str = "fp32") -> bytes:
    return load_model(path, dtype).digest


def test_digest_is_equal_at_two_paths_in_two_splits_and_in_every_dtype(tmp_path: Path) -> None:
    path = directory(tmp_path)
    whole = digest(path)
    assert len(whole) == 32
    copy = shutil.copytree(path, tmp_path / "another-name")
    assert digest(copy) == whole
    assert {digest(path, dtype) for dtype in ("bf16", "fp16", "float64")} == {whole}
    split = peers.save_peer(peers.make_peer("llama"), tmp_path / "split", max_shard_size="30KB")
    assert digest(split) == whole


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 2e-5}, {"rope_parameters": {"rope_theta": 10001.0}}, {"eos_token_id": 3}, {"hidden_act": "gelu"}],
)
def test_digest_follows_the_configuration(changes: dict[str, object], tmp_path: Path) -> None:
    path = directory(tmp_path)
    (path / "generation_config.json").unlink()
    before = digest(path)
    edit_json(path, changes)
    assert digest(path) != before


def test_digest_does_not_follow_what_changes_nothing(tmp_path: Path) -> None:
    path = directory(tmp_path)
    before = digest(path)
    edit_json(path, {"_name_or_path": "elsewhere", "transformers_version": "0", "attention_dropout": 0.5})
    assert digest(path) == before


def test_digest_follows_every_tensor_and_the_stored_dtype(tmp_path: Path) -> None:
    path = directory(tmp_path)
    tensors = load_file(path / "model.safetensors")
    digests = {digest(path)}
    for name, tensor in tensors.items():
        flipped = tensor.clone()
        flipped.view(torch.int32).view(-1)[-1] ^= 1  # the last bit of the last value
        edit_tensors(path, {name: flipped})
        digests.add(digest(path))
        edit_tensors(path, {name: tensor})
    assert len(digests) == 1 + len(tensors)
    edit_tensors(path, {NORM: tensors[NORM].to(torch.float64)})
    assert digest(path) not in digests


def test_two_tensors_exchanged_change_the_digest(tmp_path: Path) -> None:
    path = directory(tmp_path)
    tensors = load_file(path / "model.safetensors")
    before = digest(path)
    other = NORM.replace("layers.2", "layers.1")
    edit_tensors(path, {NORM: tensors[other].clone(), other: tensors[NORM].clone()})
    assert digest(path) != before


def test_gguf_digest_is_equal_at_two_paths(tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "a.gguf")
    copy = Path(shutil.copy(path, tmp_path / "b.gguf"))
    assert digest(path) == digest(copy, "bf16")
    renamed = write_gguf(peers.make_peer("llama"), tmp_path / "c.gguf", metadata={"general.name": "other"})
    assert digest(renamed) == digest(path)
    changed = write_gguf(peers.make_peer("llama"), tmp_path / "d.gguf", metadata={"llama.rope.freq_base": 9999.0})
    assert digest(changed) != digest(path)
