"""Every family against the peer library: fp32 logits at every position, however the prompt is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.engine.load import load_model
from pdserve.engine.native.path import why_not
from pdserve.engine.plan import EngineConfig
from pdserve.engine.spec import ModelSpec
from tests.engine.loading import peers
from tests.engine.tiny import spec as tiny_spec

LENGTH = 23
CUTS = {
    "prefill": (),
    "chunked": (3, 4, 11, 20),
    "decode": tuple(range(9, LENGTH)),  # a prompt of nine, then token by token
}


Checkpoints = Mapping[str, tuple[Any, Path]]

# What the native kernels say that they do not know of a family.
PLAIN_ONLY = {
    "smollm3": "layer_positions",
    "smollm3-windows": "layer_positions",
    "smollm3-windows-long": "layer_positions",
    "granite": "residual_scale",
    "olmo2": "norm_order",
    "gemma2": "norm_order",
    "gemma2-long-window": "norm_order",
    "gemma3": "norm_order",
    "gemma3-long-window": "norm_order",
    "gemma4": "norm_order",
    "gemma4-global-heads": "norm_order",
    "gemma4-experts": "norm_order",
    "qwen3-moe": "experts",
    "qwen3-moe-mixed": "experts",
    "qwen3-moe-mixed-long": "experts",
    "mixtral": "experts",
    "mixtral-window": "experts",
    "mixtral-window-long": "experts",
    "qwen2-moe": "experts",
    "lfm2": "layer_positions",
    "lfm2-long-kernel": "layer_positions",
    "gpt-oss": "experts",
    "gpt-oss-long-window": "experts",
    "minimax-m2": "qk_norm_whole",
    "gpt-neox": "parallel",
    "stablelm-parallel": "parallel",
    "nemotron": "activation",
    "falcon": "parallel",
    "falcon-groups": "parallel",
    "falcon-groups-one-norm": "parallel",
    "opt-post-norm": "an output projection before the head",
    "bloom": "positions of kind alibi",
    "bloom-six-heads": "positions of kind alibi",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made = {}
    for name in peers.NAMES:
        model = peers.make_peer(name)
        made[name] = (model, peers.save_peer(model, tmp_path_factory.mktemp(name)))
    return made


@pytest.mark.parametrize("name", peers.NAMES)
def test_logits_equal_the_peers(name: str, checkpoints: Checkpoints) -> None:
    model, path = checkpoints[name]
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(model, ids)
    assert float(expected.std()) > 0.1, "flat logits would hide a difference"
    loaded = load_model(path, "fp32")
    for kernels in ("plain",) if name in PLAIN_ONLY else ("plain", "native"):
        for cuts in CUTS.values():
            got = peers.engine_logits(peers.new_engine(loaded, kernels=kernels), ids, cuts)
            torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


@pytest.mark.parametrize("name", peers.NAMES)
def test_the_kernels_run_a_family_or_say_what_they_do_not_know(name: str, checkpoints: Checkpoints) -> None:
    spec = load_model(checkpoints[name][1], "fp32").spec
    assert why_not(spec, EngineConfig(dtype="fp32")).split(" =")[0] == PLAIN_ONLY.get(name, "")


def test_what_the_kernels_do_not_list_is_declined_whatever_its_value() -> None:
    """So a field that is added to ModelSpec is plain torch's alone until the kernels are told of it."""
    names = [field.name for field in dataclasses.fields(ModelSpec)]
    for name in names[names.index("layer_positions") :]:
        if name not in ("embed_norm", "embed_scale"):  # torch embeds for the kernels
            declined = why_not(tiny_spec(**{name: object()}), EngineConfig(dtype="fp32"))
            assert declined.startswith(name), name


@pytest.mark.parametrize("name", [name for name in peers.NAMES if not name.startswith("llama")])
def test_deterministic_mode_gives_the_peers_logits_in_equal_bits(name: str, checkpoints: Checkpoints) -> None:
    """Whole, in chunks, token by token, and beside another sequence in other pages."""
    model, path = checkpoints[name]
    ids, loaded = peers.prompt(LENGTH), load_model(path, "fp32")
    runs = [
        peers.engine_logits(peers.new_engine(loaded, page_size=size, deterministic=True), ids, cuts, beside=beside)
        for cuts, beside, size in (((), False, 4), (CUTS["chunked"], True, 3), (CUTS["decode"], True, 16))
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)
    torch.testing.assert_close(runs[0], peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE)


def test_logits_equal_the_peers_from_shards(tmp_path: Path) -> None:
    model = peers.make_peer("llama")
    peers.save_peer(model, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = peers.prompt(LENGTH)
    torch.testing.assert_close(
        peers.load_logits(tmp_path, ids), peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE
    )


def test_bf16_checkpoint_loads_in_fp32_without_loss(tmp_path: Path) -> None:
    peers.save_peer(peers.make_peer("llama").to(torch.bfloat16), tmp_path)
    ids = peers.prompt(LENGTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = peers.peer_logits(model, ids)
    torch.testing.assert_close(peers.load_logits(tmp_path, ids), expected, rtol=0, atol=peers.TOLERANCE)
