"""DeciLM's GGUF files: layers of unequal heads and MLPs, with a matrix or nothing in attention's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.spec import LayerShape
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.unequal import KINDS, Kind, make_unequal, write_unequal

LENGTH = 23
CUTS = {"prefill": (), "chunked": (3, 4, 11, 20), "decode": tuple(range(9, LENGTH))}
SEVEN_B = (Kind(4), Kind(1), Kind(2), Kind(2))  # as DeciLM-7B: only the KV heads differ


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    model = make_unequal()
    return model, load_model(write_unequal(model, tmp_path_factory.mktemp("deci") / "tiny.gguf"), "fp32")


def test_logits_equal_the_peers(made: tuple[Any, LoadedModel]) -> None:
    model, loaded = made
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(model, ids)
    assert float(expected.std()) > 0.1
    for cuts in CUTS.values():
        for beside in (False, True):
            got = peers.engine_logits(peers.new_engine(loaded), ids, cuts, beside=beside)
            torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


def test_deterministic_mode_gives_the_peers_logits_in_equal_bits(made: tuple[Any, LoadedModel]) -> None:
    model, loaded = made
    ids = peers.prompt(LENGTH)
    runs = [
        peers.engine_logits(peers.new_engine(loaded, page_size=size, deterministic=True), ids, cuts, beside=beside)
        for cuts, beside, size in (((), False, 4), (CUTS["chunked"], True, 3), (CUTS["decode"], True, 16))
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)
    torch.testing.assert_close(runs[0], peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE)


def test_only_the_kv_heads_may_differ_and_the_rest_be_one_number(tmp_path: Path) -> None:
    model = make_unequal(SEVEN_B)
    loaded = load_model(write_unequal(model, tmp_path / "tiny.gguf", SEVEN_B), "fp32")
    assert [shape.kv_heads for shape in loaded.spec.layer_shapes] == [4, 1, 2, 2] and not loaded.spec.layer_ffn
    ids = peers.prompt(LENGTH)
    got = peers.engine_logits(peers.new_engine(loaded), ids, CUTS["decode"])
    torch.testing.assert_close(got, peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE)


def test_the_sizes_are_those_that_the_peer_reads_from_the_file(made: tuple[Any, LoadedModel]) -> None:
    loaded = made[1]
    assert loaded.path is not None
    config = load_gguf_checkpoint(str(loaded.path))["config"]
    shapes, layers = loaded.spec.layer_shapes, range(len(KINDS))
    assert config["model_type"] == "deci"
    assert config["num_attention_heads"] == [shape.heads for shape in shapes]
    assert config["num_key_value_heads"] == [shape.kv_heads for shape in shapes]
    assert config["intermediate_size"] == [loaded.spec.ffn_of(layer) for layer in layers]
    assert shapes[1] == LayerShape(0, 0, 0) and shapes[3] == LayerShape(4, 0, 12)


def _another(model: LoadedModel, name: str, change: Callable[[Tensor], Tensor]) -> LoadedModel:
    return dataclasses.replace(model, tensors={**model.tensors, name: change(model.tensors[name])})


FAULTS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "a KV head of another layer's number": lambda m: _another(m, "layers.2.k.weight", lambda t: t.roll(12, 0)),
    "the matrix left out": lambda m: _another(m, "layers.3.o.weight", torch.zeros_like),
    "an MLP left out": lambda m: _another(m, "layers.1.down.weight", torch.zeros_like),
    "attention without an MLP left out": lambda m: _another(m, "layers.4.o.weight", torch.zeros_like),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_moves_the_logits_far_beyond_the_tolerance(fault: str, made: tuple[Any, LoadedModel]) -> None:
    model, loaded = made
    ids = peers.prompt(LENGTH)
    got = peers.engine_logits(peers.new_engine(FAULTS[fault](loaded)), ids, CUTS["chunked"])
    assert peers.largest_difference(got, peers.peer_logits(model, ids)) > 100 * peers.TOLERANCE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", [2, 1, 4, 0, 1, 2]),  # KV heads where there is no query head
        ("attention.head_count_kv", [0, 0, 0, 0, 0, 0]),
        ("attention.head_count_kv", [2, 0, 4]),
        ("attention.head_count", [4, 0, 4, 4, 4, -4]),
        ("feed_forward_length", [56, 40, 64, 56, 0]),
    ],
)
def test_lists_that_make_no_model_are_refused_by_key(key: str, value: list[int], tmp_path: Path) -> None:
    path = write_unequal(make_unequal(), tmp_path / "tiny.gguf", metadata={f"deci.{key}": value})
    with pytest.raises(CheckpointError) as error:
        load_model(path, "fp32")
    assert error.value.field == f"deci.{key}"
