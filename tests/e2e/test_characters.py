"""Characters that several tokens make, through both doors: a stream loses nothing, and a cut one has its true bytes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from pdserve.request import REGEX, Grammar, SamplingParams
from pdserve.rpc.convert import sampling_to_proto
from pdserve.tokenizer import Tokenizer
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.stack import MODEL, Stack, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import spec
from tests.router.support import VOCAB, bundle

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Joined emoji, a skin tone, a flag, Han beyond the first plane, an accent that combines, a space of no width.
TEXT = "a👩\u200d👩\u200d👧 👍🏽🇩🇪 漢字𠜎 e\u0301\u200b€ß"
PROMPT = (5, 6, 7)
SHORT = "👩\u200d👧𠜎€"
UNKNOWN = VOCAB + 7  # the model has more ids than its tokenizer has tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[Stack]:
    wide = spec(vocab_size=VOCAB + 16, layers=1)
    async with stack() as it:
        await it.add_prefill(engine(wide), bundle=bundle())
        await it.add_decode(engine(wide), bundle=bundle())
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(made: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}/v1", timeout=WAIT_S) as it:
        yield it


def only(text: str, max_tokens: int = 200) -> SamplingParams:
    """The model can say nothing else; how it cuts the text into tokens is its own choice."""
    return SamplingParams(seed=5, temperature=2.0, grammar=Grammar(REGEX, re.escape(text)), max_tokens=max_tokens)


async def over_grpc(made: Stack, params: SamplingParams, ids: tuple[int, ...] = PROMPT) -> list[bytes]:
    """The pieces of a stream."""
    request = gateway_pb2.GenerateRequest(
        model=MODEL, tokens=gateway_pb2.TokenPrompt(ids=ids), sampling=sampling_to_proto(params)
    )
    call = gateway_pb2_grpc.GatewayStub(made.channels.get(made.router.address)).Generate(request, timeout=WAIT_S)
    return [event.tokens.text async for event in call if event.HasField("tokens")]


async def over_http(http: httpx.AsyncClient, text: str, max_tokens: int = 200) -> str:
    """The same request; its pieces put together."""
    asked = {"model": MODEL, "prompt": PROMPT, "seed": 5, "temperature": 2.0, "max_tokens": max_tokens, "stream": True}
    body = {**asked, "structured_outputs": {"regex": re.escape(text)}}
    async with http.stream("POST", "/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


async def test_a_stream_is_lossless_and_no_piece_ends_inside_a_character(made: Stack, http: httpx.AsyncClient) -> None:
    pieces = await over_grpc(made, only(TEXT))
    assert b"".join(pieces).decode() == TEXT
    for piece in pieces:
        piece.decode()  # raises within a character
    assert await over_http(http, TEXT) == TEXT
    done = await made.client.complete(token_ids=PROMPT, sampling=only(TEXT))
    assert done.text == TEXT and len(done.ids) > len(TEXT), "some characters took several tokens"


async def test_an_answer_cut_anywhere_has_the_true_bytes_up_to_there(made: Stack, http: httpx.AsyncClient) -> None:
    """Over gRPC as they are; in JSON, which has only characters, half a one is replaced."""
    whole = (await made.client.complete(token_ids=PROMPT, sampling=only(SHORT))).ids
    tokenizer, inside = Tokenizer(bundle()), 0
    for count in range(1, len(whole)):
        true = b"".join(tokenizer.token_bytes(token) for token in whole[:count])
        assert SHORT.encode().startswith(true)
        assert b"".join(await over_grpc(made, only(SHORT, count))) == true
        shown = true.decode(errors="replace")
        assert await over_http(http, SHORT, count) == shown
        inside += shown.endswith("\ufffd")
    assert inside > 5, "answers that ended inside a character"


async def test_an_id_beyond_the_tokenizer_has_no_text_and_counts(made: Stack) -> None:
    params = SamplingParams(temperature=0, seed=0, max_tokens=3, logit_bias={UNKNOWN: 100.0}, ignore_eos=True)
    assert b"".join(await over_grpc(made, params, (5, UNKNOWN, 7))) == b""
    done = await made.client.complete(token_ids=(5, UNKNOWN, 7), sampling=params)
    assert (done.ids, done.text, done.usage.output_tokens) == ((UNKNOWN,) * 3, "", 3)
