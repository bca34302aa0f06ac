"""Each family handed off once, over real gRPC: the answer is the peer library's, first logits and tokens.

The two workers keep pages of other sizes and axis orders, so every K and V is moved, not copied whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_transfer.contract import MUST_EQUAL, diff
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import EngineConfig
from pdserve.registry.records import Registry
from pdserve.request import SamplingParams
from pdserve.tokenizer import Bundle
from pdserve.worker_main import open_worker
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.e2e.stack import pair
from tests.engine.loading import peers
from tests.engine.loading.unequal import make_unequal, write_unequal

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
    "gemma4",
    "gemma4-global-heads",
    "qwen3-moe-mixed",
    "mixtral",
    "qwen2-moe",
    "minimax-m2",
    "gpt-oss",
    "lfm2",
    "stablelm-parallel",
    "nemotron",
    "falcon-groups",
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
    await handed_over(peer, peers.save_peer(peer, tmp_path / "model"))


async def handed_over(peer: Any, path: Path) -> None:
    """One request through a pair of workers, compared with the peer."""
    ids = peers.prompt(23)
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


async def test_layers_of_unequal_sizes_in_a_gguf_file_are_handed_over(tmp_path: Path) -> None:
    peer = make_unequal()
    await handed_over(peer, write_unequal(peer, tmp_path / "deci.gguf"))


async def test_workers_that_serve_other_contexts_have_other_longrope_factors_and_are_told_apart(tmp_path: Path) -> None:
    path = peers.save_peer(peers.make_peer("phi3-longrope"), tmp_path / "model")

    def build(
        model: LoadedModel, bundle: Bundle | None, settings: PrefillSettings, registry: Registry | None
    ) -> PrefillWorker:
        return PrefillWorker(Engine(model, EngineConfig(dtype="fp32", kernels="plain")), bundle, settings, registry)

    contracts = []
    for limit in (0, 16, 12):  # the original context has 16 positions
        worker = await open_worker(build, PrefillSettings(model=str(path), context_limit=limit), None)
        contracts.append(worker.contract)
    assert [contract.context_limit for contract in contracts] == [64, 16, 12]
    found = [[d.code for d in diff(contracts[1], other) if d.kind == MUST_EQUAL] for other in contracts]
    assert found == [["POSITION_SCHEME.scaling_parameters"], [], []]
