"""Gemma 4 beyond what every family is tested for: its files of other kinds, and all that is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING

from cache_transfer.contract import diff
from pdserve.engine.cache import PagedCache
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.errors import CheckpointError
from tests.engine.loading import peer_rows, peers
from tests.engine.loading.directories import ABSENT, directory, edit_json, edit_tensors
from tests.engine.loading.gguf_writing import write_gguf

LENGTH = 23
CUTS = {"prefill": (), "chunked": (3, 4, 11, 20), "decode": tuple(range(9, LENGTH))}
ROWS = ("gemma4", "gemma4-global-heads", "gemma4-experts")


def check_against(path: Path, model: Any) -> None:
    """Logits at every position, however the prompt is run."""
    ids, loaded = peers.prompt(LENGTH), load_model(path, "fp32")
    expected = peers.peer_logits(model, ids)
    for cuts in CUTS.values():
        got = peers.engine_logits(peers.new_engine(loaded), ids, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


# -- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_gguf_file_gives_the_source_models_logits_and_the_directorys_spec(name: str, tmp_path: Path) -> None:
    model = peers.make_peer(name, attention_bias=False)
    path = write_gguf(model, tmp_path / "tiny.gguf")
    check_against(path, model)
    directory_spec = load_model(peers.save_peer(model, tmp_path / "hf"), "fp32").spec
    assert load_model(path, "fp32").spec == directory_spec


def test_a_gguf_file_gives_the_logits_of_the_peer_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer takes what it does not read from the file from defaults of its own, which we set to what the model has.

    It does not read factors of layers, so the model has ones.
    """
    model = peers.make_peer("gemma4")
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)
    words = {"tokenizer.ggml.tokens": [str(number) for number in range(peer_rows.VOCAB)]}
    path = write_gguf(model, tmp_path / "tiny.gguf", metadata={**words, "gemma4.feed_forward_length": 56})
    unread = ("head_dim", "layer_types", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    said = {key: getattr(model.config, key) for key in (*unread, "num_kv_shared_layers", "use_double_wide_mlp")}
    said |= {"final_logit_softcapping": model.config.final_logit_softcapping}
    monkeypatch.setitem(GGUF_CONFIG_DEFAULTS_MAPPING, "gemma4", said)
    reading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = peers.prompt(LENGTH)
    torch.testing.assert_close(
        peers.peer_logits(reading.eval(), ids), peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE
    )
    check_against(write_gguf(model, tmp_path / "whole.gguf"), reading)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("gemma4.attention.sliding_window_pattern", None, "MISSING_KEY"),
        ("gemma4.attention.sliding_window_pattern", [True, False], "UNSUPPORTED_KEY"),
        ("gemma4.attention.sliding_window", None, "MISSING_KEY"),
        ("gemma4.attention.key_length_swa", None, "MISSING_KEY"),
        ("gemma4.attention.value_length_swa", 8, "UNSUPPORTED_KEY"),
        ("gemma4.attention.shared_kv_layers", 6, "UNSUPPORTED_KEY"),
        ("gemma4.attention.shared_kv_layers", 5, "UNSUPPORTED_KEY"),  # no layer of each type before them
        ("gemma4.attention.head_count_kv", [2, 2, 1], "UNSUPPORTED_KEY"),
        ("gemma4.feed_forward_length", [56, 56, 56, 56, 112, 0], "UNSUPPORTED_KEY"),
        ("gemma4.rope.dimension_count", 6, "UNSUPPORTED_KEY"),
        ("gemma4.rope.scaling.type", "yarn", "UNKNOWN_KEY"),
        ("gemma4.expert_count", 4, "MISSING_KEY"),
    ],
)
def test_gguf_key_is_refused_by_name(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("gemma4"), tmp_path / "tiny.gguf", metadata={key: value})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    assert caught.value.reason == reason
    assert caught.value.field == key or reason == "MISSING_KEY"


@pytest.mark.parametrize("divisors", [[1.0] * 5 + [8.0], [1e30] + [1.0] * 5, [1.0] * 5, [1e30] * 6])
def test_other_divisors_of_frequencies_are_refused(divisors: list[float], tmp_path: Path) -> None:
    own = {"rope_freqs.weight": torch.tensor(divisors)}
    path = write_gguf(peers.make_peer("gemma4"), tmp_path / "tiny.gguf", tensors=own)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight") as caught:
        load_model(path, "fp32")
    assert caught.value.reason == "UNKNOWN_ROPE_TYPE"


# -- directories ----------------------------------------------------------------------------------

WIDE = {"1": {"head_dim": 20, "num_key_value_heads": 1}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (  # as the published files say it
            "gemma4-global-heads",
            {"per_layer_config": ABSENT, "global_head_dim": 20, "num_global_key_value_heads": 1},
        ),
        ("gemma4", {"per_layer_config": ABSENT, "global_head_dim": 12, "num_global_key_value_heads": 7}),  # no k_eq_v
        ("gemma4", {"use_bidirectional_attention": "vision"}),
        ("gemma4-global-heads", {"hidden_size_per_layer_input": None, "vocab_size_per_layer_input": 262144}),
        ("gemma4-experts", {"rope_parameters": ABSENT}),  # the peer's defaults, which the row has
    ],
)
def test_spelling_means_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = directory(tmp_path, name)
    before = load_model(path, "fp32").spec
    edit_json(path, changes)
    assert load_model(path, "fp32").spec == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, "layer_types"),
        ({"per_layer_config": {"6": {}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"num_attention_heads": 2}}}, "num_attention_heads"),
        ({"per_layer_config": WIDE}, "per_layer_config"),  # not in all layers without a window
        ({"per_layer_config": ABSENT}, "model.layers.1.self_attn.q_proj.weight"),  # heads of 512 by default
        ({"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input"),
        ({"hidden_size_per_layer_input": ABSENT}, "hidden_size_per_layer_input"),
        ({"sliding_window": ABSENT}, "sliding_window"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_type"),
        ({"rope_parameters": {"every": {}}}, "every"),
        ({"hidden_activation": "silu6"}, "hidden_activation"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),  # of Gemma 3n
    ],
)
def test_config_key_is_refused_by_name(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = directory(tmp_path, "gemma4")
    edit_json(path, changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    assert caught.value.field == field and caught.value.remedy


def test_weights_that_upper_layers_do_not_read_may_be_there_and_others_may_not(tmp_path: Path) -> None:
    """As in the published files: layers that read another's cache have projections for one, too."""
    path = directory(tmp_path, "gemma4")
    before = load_model(path, "fp32")
    names = [f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    edit_tensors(path, {name: torch.zeros(24, 40) for name in names})
    after = load_model(path, "fp32")
    assert after.spec == before.spec and after.tensors.keys() == before.tensors.keys()
    for name in ("model.layers.5.self_attn.sinks", "model.layers.3.self_attn.k_norm.bias"):
        edit_tensors(path, {name: torch.zeros(4)})
        with pytest.raises(CheckpointError) as caught:
            load_model(path, "fp32")
        assert caught.value.field == name
        edit_tensors(path, {name: None})


def test_workers_with_other_shared_layers_are_told_apart(tmp_path: Path) -> None:
    loaded = load_model(directory(tmp_path, "gemma4"), "fp32")
    own = peers.new_engine(loaded).contract()
    assert [len(planes) for planes in own.planes] == [2, 2, 2, 2, 0, 0]
    other = peers.new_engine(load_model(directory(tmp_path / "other", "gemma4-experts"), "fp32")).contract()
    assert "PLANES[4].k.heads" in {difference.code for difference in diff(own, other)}


def test_the_pool_holds_nothing_for_layers_that_read_anothers_cache(tmp_path: Path) -> None:
    loaded = load_model(directory(tmp_path, "gemma4"), "fp32")
    whole = dataclasses.replace(loaded.spec, kv_layers=())
    engine = peers.new_engine(loaded)
    every = PagedCache(whole, EngineConfig(dtype="fp32", pages=32, page_size=peers.PAGE))
    assert 6 * engine.cache.nbytes == 4 * every.nbytes


# -- the text model inside a checkpoint that sees and hears -----------------------------------------

_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip


def whole_checkpoint(path: Path) -> Any:
    """With a tower that sees; every parameter of its text model is random."""
    text = peers.make_peer("gemma4").config.to_dict()
    config = transformers.Gemma4Config(text_config=text, vision_config=_VISION)
    torch.manual_seed(3)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "language_model" in key and ("norm" in key or "layer_scalar" in key):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model


def test_the_text_model_of_a_whole_checkpoint_is_served(tmp_path: Path) -> None:
    model = whole_checkpoint(tmp_path / "whole")
    assert any("vision_tower" in name for name, _ in model.named_parameters())
    check_against(tmp_path / "whole", model)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"text_config": ABSENT}, "text_config"),
        ({"text_config": "large"}, "text_config"),
        ({"speech_config": {}}, "speech_config"),
        ({"model_type": "gemma4_unified"}, "model_type"),
        ({"architectures": ["Gemma4UnifiedForConditionalGeneration"]}, "architectures"),
    ],
)
def test_what_stands_around_the_text_model_is_refused_by_name(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    text = json.loads((directory(tmp_path, "gemma4") / "config.json").read_text())
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "model" / "config.json").write_text(json.dumps(whole))
    edit_json(tmp_path / "model", changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "model", "fp32")
    assert caught.value.field == field
