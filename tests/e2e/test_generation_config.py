"""A checkpoint's own sampling: what a request leaves out is as its generation_config.json has it, through both doors.

Settings are such that sampling is certain, so that `transformers`, which reads the same file, gives the very answer.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer as Backend

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient
from pdserve.engine.load import load_model
from pdserve.tokenizer import load_bundle
from router.app import Router
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, edit_json
from tests.router.support import ENGINE, REGISTRY, VOCAB, bundle, router_settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 16
PROMPT = list(peers.prompt(9))
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Served name -> what its generation_config.json states.
STATED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 1e-4},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "repetition_penalty": {"top_k": 1, "repetition_penalty": 4.0},
    "ends": {"top_k": 1},  # and two end tokens, see below
}
CERTAIN = [name for name in STATED if name != "nothing"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stated")
    first = peers.save_peer(peers.make_peer("llama", vocab_size=VOCAB), folder / "nothing")
    Backend.from_str(bundle().tokenizer_json).save(str(first / "tokenizer.json"))
    edit_json(first, {"eos_token_id": None})
    made = {name: folder / name for name in STATED}
    for name, stated in STATED.items():
        if name != "nothing":
            shutil.copytree(first, made[name])
        settings = {"eos_token_id": ABSENT, "bos_token_id": ABSENT, "do_sample": True, "pad_token_id": 0, **stated}
        edit_json(made[name], settings, "generation_config.json")
    free = oracle(made["top_k"])
    ends = [VOCAB - 1, next(token for n, token in enumerate(free) if n >= 4 and token not in free[:n])]
    edit_json(made["ends"], {"eos_token_id": ends}, "generation_config.json")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(checkpoints: dict[str, Path]) -> AsyncIterator[Router]:
    router = Router(router_settings(disaggregate="never"))
    await router.start()
    workers = []
    try:
        for name, path in checkpoints.items():
            settings = DecodeSettings(worker_id=name, name=name, engine=ENGINE, registry=REGISTRY)
            workers.append(DecodeWorker(load_model(path, "fp32"), load_bundle(path), settings, router.registry))
            await workers[-1].start()
        await router.pool.refresh()
        yield router
        assert not any(worker.blocks.held_count for worker in workers)
    finally:
        for worker in workers:
            await worker.stop()
        await router.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare(router: Router) -> tuple[list[int], list[int]]:
    """Answers of the checkpoint that states nothing: to a request that names nothing, and to one that names all."""
    return await served(router, "nothing"), await served(router, "nothing", **NEUTRAL, ignore_eos=True)


def oracle(path: Path, **named: Any) -> list[int]:
    """What `transformers` writes with this checkpoint's settings, but for those that are named."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, **named)
    return [int(token) for token in output[0, len(PROMPT) :]]


async def served(router: Router, name: str, **named: Any) -> list[int]:
    """The ids of the answer, the same through both doors."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": COUNT, "seed": 3, "return_token_ids": True, **named}
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}/v1", timeout=20) as http:
        answer = await http.post("/completions", json=body)
    async with AsyncClient(router.address) as ours:
        again = await ours.complete(token_ids=PROMPT, model=name, max_tokens=COUNT, seed=3, **named)
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    assert list(again.ids) == ids
    return ids


@pytest.mark.parametrize("name", CERTAIN)
async def test_what_a_request_leaves_out_is_as_the_checkpoint_has_it(
    router: Router, checkpoints: dict[str, Path], bare: tuple[list[int], list[int]], name: str
) -> None:
    expected = oracle(checkpoints[name])
    assert await served(router, name) == expected
    assert bare[0] != expected  # otherwise it would show nothing
    if name == "ends":
        assert 4 < len(expected) < COUNT  # the list's second one
    if name == "repetition_penalty":
        assert expected != oracle(checkpoints["top_k"])


@pytest.mark.parametrize("name", CERTAIN)
async def test_what_a_request_names_is_as_it_names_it(
    router: Router, checkpoints: dict[str, Path], bare: tuple[list[int], list[int]], name: str
) -> None:
    assert await served(router, name, **NEUTRAL, ignore_eos=True) == bare[1]
    if name == "repetition_penalty":  # one named, the other left
        named = {"repetition_penalty": 1.0}
        assert await served(router, name, **named) == oracle(checkpoints[name], **named) == oracle(checkpoints["top_k"])
    if name == "ends":
        assert await served(router, name, ignore_eos=True) == oracle(checkpoints["top_k"])
