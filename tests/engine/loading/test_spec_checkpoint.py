"""Plain ModelSpec checkpoints: what is written is what is read, and everything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.load import load_model, save_spec_checkpoint
from pdserve.engine.spec import ModelSpec
from pdserve.engine.weights import expected_tensors
from pdserve.errors import CheckpointError

SPEC = ModelSpec(
    vocab_size=11,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_width=12,
    context_limit=32,
    positions=PositionScheme(
        kind="rope",
        theta=100.0,
        dims=6,
        scaling="llama3",
        scaling_parameters=(("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
        original_max_positions=16,
    ),
    norm="layer",
    norm_shift=True,
    norm_order="post",
    mlp="plain",
    activation="gelu",
    qkv_bias=True,
    head_bias=True,
    embed_width=5,
    out_width=7,
    projection_bias=True,
    sliding_window=(0, 4),
    bos_id=1,
    eos_ids=(2, 3),
)


def tensors_of(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = expected_tensors(spec).items()
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.pdmodel"
    save_spec_checkpoint(path, SPEC, tensors_of(SPEC))
    return path


def edit_spec(path: Path, key: str, value: Any) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    spec = json.loads(metadata["pdserve.spec"])
    spec[key] = value
    rewrite(path, {**metadata, "pdserve.spec": json.dumps(spec)})


def rewrite(path: Path, metadata: dict[str, str] | None) -> None:
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path, metadata=metadata)


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "float64")
    return caught.value


def test_what_single_layers_have_is_written_and_read(tmp_path: Path) -> None:
    rope = PositionScheme(kind="rope", theta=100.0, dims=6)
    spec = dataclasses.replace(
        SPEC, positions=rope, layer_positions=(rope, PositionScheme(kind="none")), mlp="gated", experts=3,
        active_experts=2, expert_width=5, norm_experts=True, dense_layers=(1,), logit_soft_cap=30.0,
        shared_width=3,
    )  # fmt: skip
    tensors = tensors_of(spec)
    assert tensors["layers.0.expert_gate.weight"].shape == (3, 5, 8) and "layers.1.up.weight" in tensors
    save_spec_checkpoint(tmp_path / "tiny.pdmodel", spec, tensors)
    loaded = load_model(tmp_path / "tiny.pdmodel", "float64")
    assert loaded.spec == spec
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())


def test_written_checkpoint_is_read_bit_for_bit(checkpoint: Path) -> None:
    model = load_model(checkpoint, "float64")
    assert model.spec == SPEC
    expected = tensors_of(SPEC)
    assert set(model.tensors) == set(expected)
    assert all(torch.equal(model.tensors[name], tensor) for name, tensor in expected.items())
    assert load_model(checkpoint, "bf16").digest == model.digest


def test_safetensors_suffix_is_read_too(checkpoint: Path) -> None:
    other = checkpoint.rename(checkpoint.with_suffix(".safetensors"))
    assert load_model(other, "float64").spec == SPEC


def test_tensors_that_do_not_fit_the_spec_are_not_written(tmp_path: Path) -> None:
    tensors = tensors_of(SPEC)
    del tensors["layers.1.up.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.up\.weight"):
        save_spec_checkpoint(tmp_path / "bad.pdmodel", SPEC, tensors)
    with pytest.raises(CheckpointError, match="kv_heads"):
        save_spec_checkpoint(tmp_path / "bad.pdmodel", dataclasses.replace(SPEC, kv_heads=3), tensors)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_spec_checkpoint(tmp_path / "absent" / "bad.pdmodel", SPEC, tensors_of(SPEC))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("mystery", 1, "spec.mystery"),
        ("width", "8", "spec.width"),
        ("width", True, "spec.width"),
        ("width", 9, "embed"),  # then no tensor fits any more
        ("norm_scale", 1, "spec.norm_scale"),
        ("norm_eps", -1.0, "norm_eps"),
        ("norm", "batch", "norm"),
        ("activation", "mish", "activation"),
        ("sliding_window", 4, "spec.sliding_window"),
        ("sliding_window", [4], "sliding_window"),
        ("sliding_window", [0, -4], "sliding_window"),
        ("eos_ids", [11], "eos_ids"),
        ("positions", {"theta": 1.0}, "kind"),
        ("positions", {"kind": "rope", "spin": 1.0}, "spec.positions.spin"),
        ("positions", {"kind": "alibi"}, "positions.dims"),
        ("positions", {"kind": "rope", "theta": 1.0, "dims": 5}, "positions.dims"),
        ("positions", {"kind": "learned", "dims": 31}, "context_limit"),
        ("positions", {"kind": "rope", "scaling_parameters": [["factor"]]}, "spec.positions.scaling_parameters"),
    ],
)
def test_spec_field_is_refused_by_name(key: str, value: Any, field: str, checkpoint: Path) -> None:
    edit_spec(checkpoint, key, value)
    error = refusal(checkpoint)
    assert error.field == field or (field == "embed" and error.reason == "TENSOR_SHAPE")


def test_file_without_a_spec_or_of_another_version_is_refused(checkpoint: Path) -> None:
    with safe_open(checkpoint, framework="pt") as file:
        metadata = dict(file.metadata())
    rewrite(checkpoint, {**metadata, "pdserve.version": "2"})
    assert refusal(checkpoint).field == "pdserve.version"
    rewrite(checkpoint, {**metadata, "pdserve.spec": "{"})
    assert refusal(checkpoint).field == "pdserve.spec"
    rewrite(checkpoint, {**metadata, "pdserve.spec": "[]"})
    assert refusal(checkpoint).field == "spec"
    rewrite(checkpoint, {**metadata, "pdserve.spec": "{}"})
    assert refusal(checkpoint).reason == "MISSING_KEY"
    rewrite(checkpoint, None)
    assert refusal(checkpoint).reason == "NOT_A_MODEL"


def test_truncated_checkpoint_is_refused(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    error = refusal(checkpoint)
    assert (error.field, error.reason) == ("tiny.pdmodel", "BAD_FILE")
