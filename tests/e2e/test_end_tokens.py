"""A checkpoint names its end tokens in one of several places: answers end where the peer's do, without their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.tokenizer import load_bundle
from tests.e2e.stack import MODEL, stack
from tests.e2e.watched import WAIT_S
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, edit_json
from tests.router.support import VOCAB, bundle

COUNT = 24
ENGINE = EngineConfig(dtype="fp32", pages=64, page_size=4, kernels="plain")
PROMPT = list(peers.prompt(9))
OTHER = 1  # an end token, too, which this answer does not reach

# What config.json says, and what generation_config.json says; `END` stands for the end token.
END: Any = object()
PLACES: dict[str, tuple[Any, Any]] = {
    "one id in the configuration": (END, None),
    "a list in the configuration": ([OTHER, END], None),
    "one id in the generation configuration": (ABSENT, END),
    "a list in the generation configuration alone": (ABSENT, [END, OTHER]),
}


@pytest.fixture(scope="module")
def peer() -> Any:
    return peers.make_peer("llama", vocab_size=VOCAB)


def continued(model: Any, **options: Any) -> list[int]:
    """The peer's greedy answer, its end token included."""
    ids = torch.tensor([PROMPT])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, pad_token_id=0, **options
    )
    return [int(token) for token in output[0, len(PROMPT) :]]


def with_end(value: Any, end: int) -> Any:
    return [with_end(each, end) for each in value] if isinstance(value, list) else end if value is END else value


@pytest.mark.parametrize("place", PLACES)
async def test_an_answer_ends_where_the_peers_does(peer: Any, place: str, tmp_path: Path) -> None:
    free = continued(peer, eos_token_id=-1)
    assert len(free) == COUNT and OTHER not in free
    backend = Backend.from_str(bundle().tokenizer_json)
    # An ordinary token, whose text would be seen, and which has not come before.
    end = next(token for n, token in enumerate(free) if n >= 6 and token not in free[:n] and backend.decode([token]))

    path = peers.save_peer(peer, tmp_path / "model")
    backend.save(str(path / "tokenizer.json"))
    config, generation = (with_end(value, end) for value in PLACES[place])
    edit_json(path, {"eos_token_id": config})
    if generation is None:
        (path / "generation_config.json").unlink()
    else:
        edit_json(path, {"eos_token_id": generation}, "generation_config.json")
    expected = continued(transformers.AutoModelForCausalLM.from_pretrained(path))
    assert expected == free[: free.index(end) + 1]

    async with stack() as made:
        await made.add_prefill(Engine(load_model(path, "fp32"), ENGINE), bundle=load_bundle(path))
        await made.add_decode(Engine(load_model(path, "fp32"), ENGINE), bundle=load_bundle(path))
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}/v1", timeout=WAIT_S) as http:
            body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, "return_token_ids": True}
            (ended,) = (await http.post("/completions", json=body)).json()["choices"]
            (went_on,) = (await http.post("/completions", json={**body, "ignore_eos": True})).json()["choices"]
    assert (ended["token_ids"], ended["finish_reason"]) == (expected, "stop")
    assert ended["text"] == backend.decode(expected[:-1]), "the end token's text is not part of the answer"
    assert (went_on["token_ids"], went_on["finish_reason"]) == (free, "length")
