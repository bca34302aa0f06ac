"""dtype = "auto": the checkpoint's own precision is kept, a given one overrides it."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model, save_spec_checkpoint
from pdserve.engine.plan import EngineConfig
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, edit_json
from tests.engine.loading.gguf_writing import write_gguf
from tests.engine.tiny import TINY, tiny_model

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", TYPES)
def test_a_directory_has_the_precision_it_says_or_that_of_its_tensors(dtype: str, tmp_path: Path) -> None:
    path = peers.save_peer(peers.make_peer("llama").to(TYPES[dtype]), tmp_path / "model")
    assert {load_model(path, name).dtype for name in ("auto", dtype)} == {dtype}
    edit_json(path, {"dtype": ABSENT, "torch_dtype": str(TYPES[dtype])})  # as older files spell it
    assert load_model(path, "auto").dtype == dtype
    edit_json(path, {"torch_dtype": ABSENT})
    loaded = load_model(path, "auto")
    assert {t.dtype for t in loaded.tensors.values()} == {TYPES[dtype]}
    engine = Engine(loaded, EngineConfig(dtype="auto", pages=4))
    assert engine.contract().weight_dtype == engine.contract().kv_dtype == dtype
    assert load_model(path, "float64").tensors["embed"].dtype == torch.float64


def test_what_is_said_goes_before_what_is_stored(tmp_path: Path) -> None:
    path = peers.save_peer(peers.make_peer("llama"), tmp_path / "model")
    edit_json(path, {"dtype": "bfloat16"})
    assert load_model(path, "auto").dtype == "bf16"
    edit_json(path, {"dtype": "float8_e4m3fn"})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "auto")
    assert (caught.value.field, caught.value.reason) == ("dtype", "UNSUPPORTED_DTYPE")
    assert load_model(path, "fp32").dtype == "fp32"


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "fp16"), ("BF16", "bf16"), ("F32", "fp32"), ("Q8_0", "fp32")])
def test_a_gguf_has_that_of_its_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    model = peers.make_peer("llama", hidden_size=64, head_dim=16, intermediate_size=96)
    path = write_gguf(model, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[kind])
    assert load_model(path, "auto").dtype == dtype


def test_a_spec_checkpoint_has_that_of_its_tensors(tmp_path: Path) -> None:
    save_spec_checkpoint(tmp_path / "tiny.pdmodel", TINY, tiny_model(TINY, "bf16").tensors)
    assert load_model(tmp_path / "tiny.pdmodel", "auto").dtype == "bf16"
