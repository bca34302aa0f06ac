"""What an adapter's directory may hold: its identity is its content; what is not understood is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.adapter_files import Base, load_adapter
from pdserve.engine.load import load_model
from pdserve.errors import CheckpointError
from tests.engine import lora
from tests.engine.loading import peers
from tests.engine.tiny import tiny_engine

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Base]:
    """An adapter of q_proj and down_proj, and the base model it was made for."""
    path = tmp_path_factory.mktemp("adapter-files")
    model = lora.make_adapted("llama", {"default": {"target_modules": ["q_proj", "down_proj"]}})
    base = peers.new_engine(load_model(peers.save_peer(peers.make_peer("llama"), path / "base"), "fp32")).base
    return lora.save_adapter(model, "default", path / "adapter"), base


@pytest.fixture
def adapter(made: tuple[Path, Base], tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(made[0], tmp_path / "adapter"))


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = path / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


REFUSED_KEYS: dict[str, Any] = {
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "use_dora": True,
    "use_qalora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [5],
    "init_lora_weights": "pissa",
    "megatron_config": {"tensor_parallel": 2},
    "an_option_of_next_year": 1,
    "r": 0,
    "lora_alpha": "nan",
    "use_rslora": "yes",
    "target_modules": None,
    "layers_to_transform": ["first"],
    "rank_pattern": {"q_proj": 0},
    "alpha_pattern": {"(": 1},
    "exclude_modules": 7,
    "layers_pattern": "(",
}


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_an_option_that_is_not_supported_is_refused_by_name(key: str, adapter: Path, made: Any) -> None:
    edit_config(adapter, **{key: REFUSED_KEYS[key]})
    with pytest.raises(CheckpointError) as refused:
        load_adapter(adapter, made[1])
    assert refused.value.field == key


def test_an_adapter_that_touches_no_supported_module_is_refused(adapter: Path, made: Any) -> None:
    edit_config(adapter, target_modules=["wte"])
    edit_tensors(adapter, lambda tensors: tensors.clear())
    with pytest.raises(CheckpointError, match="changes no module") as refused:
        load_adapter(adapter, made[1])
    assert refused.value.reason == "EMPTY_ADAPTER"


@pytest.mark.parametrize("module", ["lm_head", "model.norm", "model.layers.9.self_attn.q_proj", "model.layers.0.mlp"])
def test_a_module_that_the_base_model_has_not_as_a_linear_one_is_refused(module: str, adapter: Path, made: Any) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for which in "AB":
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = torch.zeros(4, 4)

    edit_tensors(adapter, add)
    with pytest.raises(CheckpointError) as refused:
        load_adapter(adapter, made[1])
    assert (refused.value.reason, refused.value.field) == ("UNSUPPORTED_MODULE", module)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_embedding_A",
        f"{Q0}.lora_magnitude_vector",
        f"{Q0}.lora_B.bias",
        "base_model.model.lm_head.weight",
        "another.prefix.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_that_is_no_factor_is_refused(name: str, adapter: Path, made: Any) -> None:
    edit_tensors(adapter, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    with pytest.raises(CheckpointError) as refused:
        load_adapter(adapter, made[1])
    assert (refused.value.reason, refused.value.field) == ("UNKNOWN_TENSOR", name)


def test_a_missing_factor_is_refused(adapter: Path, made: Any) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{Q0}.lora_B.weight"]

    edit_tensors(adapter, drop)
    with pytest.raises(CheckpointError, match="missing") as refused:
        load_adapter(adapter, made[1])
    assert refused.value.field == f"{Q0}.lora_B.weight"


def test_modules_that_only_the_configuration_or_only_the_file_has_are_refused(adapter: Path, made: Any) -> None:
    edit_config(adapter, target_modules=["q_proj", "down_proj", "v_proj"])
    with pytest.raises(CheckpointError, match=r"no factors of it") as refused:
        load_adapter(adapter, made[1])
    assert "v_proj" in refused.value.message
    edit_config(adapter, target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match="does not name") as refused:
        load_adapter(adapter, made[1])
    assert refused.value.reason == "ADAPTER_MODULES"


def test_factors_of_another_rank_or_base_model_are_refused(adapter: Path, made: Any) -> None:
    edit_config(adapter, r=5)
    with pytest.raises(CheckpointError, match="expected") as refused:
        load_adapter(adapter, made[1])
    assert refused.value.reason == "TENSOR_SHAPE"
    edit_config(adapter, r=4)
    edit_tensors(adapter, lambda tensors: tensors.update({f"{Q0}.lora_A.weight": torch.zeros(4, 64)}))
    with pytest.raises(CheckpointError, match="another base model") as refused:
        load_adapter(adapter, made[1])
    assert refused.value.field == f"{Q0}.lora_A.weight"


def test_values_that_are_no_numbers_are_refused(adapter: Path, made: Any) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q0}.lora_A.weight"][1, 3] = torch.nan

    edit_tensors(adapter, spoil)
    with pytest.raises(CheckpointError, match="no numbers"):
        load_adapter(adapter, made[1])


def test_a_directory_without_its_files_is_refused(adapter: Path, made: Any) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        load_adapter(adapter / "adapter_config.json", made[1])
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are not read"):
        load_adapter(adapter, made[1])
    weights.write_bytes((adapter / "adapter_model.bin").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_adapter(adapter, made[1])
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        load_adapter(adapter, made[1])


def test_a_base_model_without_such_names_takes_no_adapter(adapter: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_adapter(adapter, tiny_engine().base)
    assert refused.value.reason == "NO_ADAPTERS"


def test_identity_is_content(adapter: Path, made: Any, tmp_path: Path) -> None:
    digest = load_adapter(adapter, made[1]).digest
    assert len(digest) == 32
    edit_config(adapter, lora_dropout=0.3, base_model_name_or_path="elsewhere", peft_version="9")
    assert load_adapter(adapter, made[1]).digest == digest, "only training and bookkeeping were changed"
    elsewhere = Path(shutil.copytree(adapter, tmp_path / "copy"))
    assert load_adapter(elsewhere, made[1]).digest == digest
    edit_config(adapter, lora_alpha=9)
    scaled = load_adapter(adapter, made[1]).digest
    edit_config(adapter, lora_alpha=8, use_rslora=True)
    stabilised = load_adapter(adapter, made[1]).digest

    def touch(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q0}.lora_B.weight"][0, 0] += 1.0

    edit_tensors(elsewhere, touch)
    assert len({digest, scaled, stabilised, load_adapter(elsewhere, made[1]).digest}) == 4
