"""Every family against the peer library: fp32 logits at every position, however the prompt is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.engine.load import load_model
from tests.engine.loading import peers

LENGTH = 23
CUTS = {
    "prefill": (),
    "chunked": (3, 4, 11, 20),
    "decode": tuple(range(9, LENGTH)),  # a prompt of nine, then token by token
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Any, Path]]:
    made = {}
    for name in peers.NAMES:
        model = peers.make_peer(name)
        made[name] = (model, peers.save_peer(model, tmp_path_factory.mktemp(name)))
    return made


@pytest.mark.parametrize("name", peers.NAMES)
def test_logits_equal_the_peers(name: str, checkpoints: Mapping[str, tuple[Any, Path]]) -> None:
    model, path = checkpoints[name]
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(model, ids)
    assert float(expected.std()) > 0.1, "flat logits would hide a difference"
    loaded = load_model(path, "fp32")
    for kernels in ("plain", "auto" if loaded.spec.out_width else "native"):
        for cuts in CUTS.values():
            got = peers.engine_logits(peers.new_engine(loaded, kernels=kernels), ids, cuts)
            torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


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
