"""What the prefill engine computes, through every door: the ids of the peer's tokenizer and chat template.

So the begin token is there once, and a special token is one id, never the letters of its name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdserve.request import SamplingParams
from pdserve.tokenizer import load_bundle
from tests.e2e.stack import MODEL, Stack, stack
from tests.e2e.watched import WAIT_S, WatchedEngine, engine
from tests.engine.tiny import spec
from tests.tokenizer.conftest import llama2_like, write_directory
from tests.tokenizer.test_chat import ANSWER, CHATS, INJECTION, NAMES, SYSTEM, TEMPLATES, USER

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = SamplingParams(temperature=0, seed=0, max_tokens=1)
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "a turn": CHATS["one"],
    "turns after a system message": [SYSTEM, USER, ANSWER, USER],
    "names of special tokens in a message": [INJECTION],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a begin token before every text, and a template that writes one, too."""
    path = tmp_path_factory.mktemp("llama3")
    return write_directory(path, llama2_like(), {**NAMES, "chat_template": TEMPLATES["llama3"]})


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(folder: Path) -> AsyncIterator[Stack]:
    bundle, wide = load_bundle(folder), spec(vocab_size=400, layers=1)
    async with stack() as it:
        await it.add_prefill(engine(wide), bundle=bundle)
        await it.add_decode(engine(wide), bundle=bundle)
        yield it


class Computed:
    """The prompts that the prefill engine computes from now on; a cached beginning counts as computed."""

    def __init__(self, made: Stack) -> None:
        watched = made.prefills[0].engine
        assert isinstance(watched, WatchedEngine)
        self._engine, self._seen = watched, len(watched.steps)

    def check_next(self, expected: Sequence[int]) -> None:
        chunks = [chunk for step in self._engine.steps[self._seen :] for chunk in step.plan.chunks]
        self._seen = len(self._engine.steps)
        assert chunks and chunks[-1].start + len(chunks[-1].ids) == len(expected)
        for chunk in chunks:
            assert list(chunk.ids) == list(expected[chunk.start : chunk.start + len(chunk.ids)])


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation(made: Stack, peer: Any, name: str) -> None:
    messages, computed = CONVERSATIONS[name], Computed(made)
    ids = peer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    begins = sum(message["content"].count("<s>") for message in messages) + 1
    assert ids.count(peer.bos_token_id) == begins

    done = await made.client.complete(messages=messages, sampling=ONE)
    assert done.usage.prompt_tokens == len(ids)
    computed.check_next(ids)
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
        body = {"model": MODEL, "messages": messages, "max_tokens": 1}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        computed.check_next(ids)
        told = (await http.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
        assert told["tokens"] == ids


async def test_a_text(made: Stack, peer: Any) -> None:
    plain, computed = peer("the cat")["input_ids"], Computed(made)
    assert plain.count(peer.bos_token_id) == 1
    written = peer("<s>the cat", add_special_tokens=False)["input_ids"]
    assert written.count(peer.bos_token_id) == 1
    without = peer("the cat", add_special_tokens=False)["input_ids"]
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=WAIT_S) as http:
        for text, ids in (("the cat", plain), ("<s>the cat", written)):
            await made.client.complete(text, sampling=ONE)
            computed.check_next(ids)
            await http.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 1})
            computed.check_next(ids)
        body = {"model": MODEL, "prompt": "the cat", "max_tokens": 1, "add_special_tokens": False}
        await http.post("/v1/completions", json=body)
        computed.check_next(without)
