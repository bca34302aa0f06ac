"""The files of a Hugging Face directory: tied heads, prefixes, shards, and what is missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.load import load_model
from pdserve.errors import CheckpointError, ConfigError
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, directory, edit_json, edit_tensors, truncate

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    return caught.value


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def test_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    path = directory(tmp_path, "llama-tied")
    ids = peers.prompt(9)
    expected = peers.load_logits(path, ids)
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, {"lm_head.weight": embed.clone()})
    assert "head.weight" not in load_model(path, "fp32").tensors
    assert torch.equal(peers.load_logits(path, ids), expected)


def test_tied_head_that_is_no_copy_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path, "llama-tied")
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, {"lm_head.weight": embed + 0.01})
    error = refusal(path)
    assert (error.field, error.reason) == ("tie_word_embeddings", "TIED_HEAD")


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    path = directory(tmp_path, "llama-tied")
    edit_json(path, {"tie_word_embeddings": False})
    error = refusal(path)
    assert (error.field, error.reason) == ("lm_head.weight", "MISSING_TENSOR")


def test_old_gpt2_names_without_prefix_and_with_mask_buffers(tmp_path: Path) -> None:
    model = peers.make_peer("gpt2")
    path = peers.save_peer(model, tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(tensors, path / "model.safetensors")
    ids = peers.prompt(9)
    torch.testing.assert_close(
        peers.load_logits(path, ids), peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE
    )


def test_stored_rotary_buffer_is_harmless(tmp_path: Path) -> None:
    path = directory(tmp_path)
    without = load_model(path, "fp32")
    edit_tensors(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    loaded = load_model(path, "fp32")
    assert loaded.spec == without.spec
    assert loaded.tensors.keys() == without.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in without.tensors.items())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (UP, None, "MISSING_TENSOR"),
        ("model.layers.3.mlp.up_proj.weight", torch.ones(56, 40), "UNKNOWN_TENSOR"),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(48), "UNKNOWN_TENSOR"),
        (UP, torch.ones(56, 41), "TENSOR_SHAPE"),
        (UP, torch.ones(40, 56), "TENSOR_SHAPE"),
        (UP, torch.ones(56, 40, dtype=torch.int8), "UNSUPPORTED_DTYPE"),
        (UP, torch.ones(56, 40).to(torch.float8_e4m3fn), "UNSUPPORTED_DTYPE"),
    ],
)
def test_tensor_is_refused_by_name(name: str, value: torch.Tensor | None, reason: str, tmp_path: Path) -> None:
    path = directory(tmp_path)
    edit_tensors(path, {name: value})
    error = refusal(path)
    assert (error.field, error.reason) == (name, reason)
    assert name in str(error)


def test_values_outside_fp16_are_refused(tmp_path: Path) -> None:
    path = directory(tmp_path)
    edit_tensors(path, {UP: torch.full((56, 40), 1e6)})
    load_model(path, "bf16")
    with pytest.raises(CheckpointError, match="fp16") as caught:
        load_model(path, "fp16")
    assert caught.value.field == UP


def test_truncated_safetensors(tmp_path: Path) -> None:
    path = directory(tmp_path)
    truncate(path / "model.safetensors", 100)
    error = refusal(path)
    assert (error.field, error.reason) == ("model.safetensors", "BAD_FILE")
    assert "fetch it again" in error.remedy


def test_truncated_shard(tmp_path: Path) -> None:
    path = directory(tmp_path, max_shard_size="30KB")
    truncate(shards(path)[1], 100)
    assert refusal(path).field == shards(path)[1].name


def test_missing_shard(tmp_path: Path) -> None:
    path = directory(tmp_path, max_shard_size="30KB")
    gone = shards(path)[1]
    gone.unlink()
    error = refusal(path)
    assert (error.field, error.reason) == (gone.name, "MISSING_SHARD")


def test_index_without_shards_or_shards_without_index(tmp_path: Path) -> None:
    path = directory(tmp_path, max_shard_size="30KB")
    (path / INDEX).unlink()
    error = refusal(path)
    assert error.reason == "MISSING_FILE"
    assert INDEX in str(error)
    assert shards(path)[0].name in str(error)


@pytest.mark.parametrize("shard", ["model-00099-of-00002.safetensors", "../other.safetensors", 7])
def test_index_that_names_no_shard_of_this_directory(shard: str | int, tmp_path: Path) -> None:
    path = directory(tmp_path, max_shard_size="30KB")
    (tmp_path / "other.safetensors").write_bytes(shards(path)[0].read_bytes())
    names = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path, {"weight_map": {**names, UP: shard}}, INDEX)
    assert str(shard) in str(refusal(path))


def test_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    path = directory(tmp_path, max_shard_size="30KB")
    names = json.loads((path / INDEX).read_text())["weight_map"]
    other = next(shard.name for shard in shards(path) if shard.name != names[UP])
    edit_json(path, {"weight_map": {**names, UP: other}}, INDEX)
    assert refusal(path).field == UP
    edit_json(path, {"weight_map": {**names, "model.extra": other}}, INDEX)
    assert refusal(path).field == "model.extra"
    edit_json(path, {"weight_map": ABSENT}, INDEX)
    assert refusal(path).field == "weight_map"


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff", "[" * 100_000, ""])
def test_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    path = directory(tmp_path)
    (path / "config.json").write_text(text)
    error = refusal(path)
    assert (error.field, error.reason) == ("config.json", "BAD_FILE")


def test_not_a_model(tmp_path: Path) -> None:
    assert refusal(tmp_path).field == "config.json"
    assert refusal(tmp_path / "nowhere").reason == "MISSING_FILE"
    (tmp_path / "notes.txt").write_text("hello")
    assert refusal(tmp_path / "notes.txt").reason == "NOT_A_MODEL"


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    path = directory(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    error = refusal(path)
    assert "pytorch_model.bin" in str(error)
    assert "pickled" in error.remedy


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        load_model(directory(tmp_path), "fp8")


def test_loaded_tensors_are_their_own_storage(tmp_path: Path) -> None:
    """No tensor maps the file: it can be replaced, and each storage is exactly as large as its tensor."""
    path = directory(tmp_path)
    model = load_model(path, "fp32")
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    weights = path / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.tensors.items())
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in model.tensors.values())
