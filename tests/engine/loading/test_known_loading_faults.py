"""Loading faults that other systems have had, each as its whole kind: the reference's logits, or a refusal by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.rope_scaling import within
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, directory, edit_json, edit_tensors, truncate

IDS = peers.prompt(23)


def check_parity(path: Path, model: Any) -> None:
    torch.testing.assert_close(
        peers.load_logits(path, IDS), peers.peer_logits(model, IDS), rtol=0, atol=peers.TOLERANCE
    )


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    assert caught.value.field and caught.value.field in str(caught.value)
    return caught.value


@pytest.mark.parametrize("stored", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "opt", "bloom", "gpt2"])
def test_a_tied_head_is_the_embedding_whether_it_is_stored_too_or_not(name: str, stored: bool, tmp_path: Path) -> None:
    model = peers.make_peer(name)
    path = peers.save_peer(model, tmp_path / "model")
    head = "lm_head.weight"
    edit_tensors(path, {head: model.get_input_embeddings().weight.detach() if stored else None})
    assert (head in load_file(path / "model.safetensors")) == stored
    check_parity(path, model)


@pytest.mark.parametrize(("name", "head"), [("llama", "lm_head.weight"), ("gpt-neox", "embed_out.weight")])
def test_an_untied_head_that_is_not_there_is_refused(name: str, head: str, tmp_path: Path) -> None:
    path = directory(tmp_path, name)
    edit_tensors(path, {head: None})
    assert refused(path).field == head


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path, "phi3", max_shard_size="30KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert refused(path).field == shard.name


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "30KB"}], ids=["one file", "shards"])
def test_a_file_cut_by_100_bytes_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    path = directory(tmp_path, "gemma3", **options)
    cut = sorted(path.glob("*.safetensors"))[-1]
    truncate(cut, 100)
    assert refused(path).field == cut.name


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "qwen3-moe", "mixtral"])
def test_a_head_that_is_not_width_over_heads(name: str, tmp_path: Path) -> None:
    model = peers.make_peer(name, head_dim=20)
    assert model.config.head_dim * model.config.num_attention_heads != model.config.hidden_size
    check_parity(peers.save_peer(model, tmp_path / "model"), model)


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["beside", "inside"])
@pytest.mark.parametrize("name", ["llama3-scaled", "llama-linear", "llama-yarn", "phi3-longrope"])
def test_the_rotary_base_and_kind_are_found_where_they_stand(name: str, place: str, kind: str, tmp_path: Path) -> None:
    model = peers.make_peer(name)
    path = peers.save_peer(model, tmp_path / "model")
    scaling = dict(model.config.rope_parameters)
    scaling[kind] = scaling.pop("rope_type")
    if place == "beside":
        changes = {"rope_parameters": ABSENT, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    else:
        changes = {"rope_parameters": scaling}
    edit_json(path, changes)
    check_parity(path, model)


@pytest.mark.parametrize("kind", ["ntk", "proportional", "axial", "mrope", ""])
@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt-neox", "olmo2"])
def test_an_unknown_rotary_kind_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = directory(tmp_path, name)
    edit_json(path, {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})
    assert (refused(path).field, refused(path).reason) == ("rope_type", "UNKNOWN_ROPE_TYPE")


def test_a_prompt_within_the_original_context_gets_the_short_factors_where_no_longer_one_is_served(
    tmp_path: Path,
) -> None:
    """The peer chooses by the length of the prompt; a worker chooses once, by the context that it serves."""
    model = peers.make_peer("phi3-longrope")
    long = load_model(peers.save_peer(model, tmp_path / "model"), "fp32")
    assert (long.spec.context_limit, dict(long.spec.positions.scaling_parameters)["long"]) == (64, 1.0)
    short: LoadedModel = dataclasses.replace(long, spec=within(long.spec, 16))
    assert within(long.spec, 17).positions == long.spec.positions != short.spec.positions
    ids = IDS[:15]
    expected = peers.peer_logits(model, ids)
    got = peers.engine_logits(peers.new_engine(short), ids, (4, 9))
    torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
    assert peers.largest_difference(peers.engine_logits(peers.new_engine(long), ids), expected) > 0.01
