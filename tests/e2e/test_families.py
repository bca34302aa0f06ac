"""Each family handed off once, over real gRPC: the answer is the peer library's, first logits and tokens.

The two workers keep pages of other sizes and axis orders, so every K and V is moved, not copied whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.request import SamplingParams
from tests.e2e.stack import pair
from tests.engine.loading import peers

FAMILIES = (
    "llama-yarn",
    "mistral-short-window",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3-longrope",
    "smollm3",
    "granite",
    "olmo2",
    "starcoder2",
    "gemma2",
    "gemma3",
    "qwen3-moe-mixed",
    "mixtral",
    "gpt-neox",
    "opt-post-norm",
    "bloom",
    "gpt2",
)
COUNT = 5
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, seed=0, ignore_eos=True)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_handed_over_answer_is_the_peers(name: str, tmp_path: Path) -> None:
    peer = peers.make_peer(name)
    path, ids = peers.save_peer(peer, tmp_path / "model"), peers.prompt(23)
    own = {"dtype": "fp32", "kernels": "plain"}
    prefill = Engine(load_model(path, "fp32"), EngineConfig(**own, pages=32, page_size=4))  # type: ignore[arg-type]
    decode = Engine(load_model(path, "fp32"), EngineConfig(**own, pages=32, page_size=3, axis_order="nhd"))  # type: ignore[arg-type]
    async with pair(prefill, decode) as made:
        answer = await made.ask(ids, GREEDY)
        first = np.frombuffer(made.first_logits(answer), np.float32)
    assert answer.record is not None and answer.record.sent_tokens == len(ids) and answer.record.frames_sent > 0
    wanted = list(ids)
    for number in range(COUNT):
        logits = peers.peer_logits(peer, wanted)[-1]
        if not number:
            torch.testing.assert_close(torch.from_numpy(first.copy()), logits, rtol=0, atol=peers.TOLERANCE)
        wanted.append(int(logits.argmax()))
    assert list(answer.ids) == wanted[len(ids) :]
