"""/v1/completions through the official client and as raw HTTP, in front of real workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from pdserve.client.request import build
from pdserve.errors import Internal
from pdserve.registry.records import DECODE
from pdserve.request import SamplingParams
from pdserve.tokenizer import Tokenizer
from pdserve.tokenizer.bundle import SAMPLING_NAMES
from pdserve.v1 import gateway_pb2
from router.gateway_ask import asks_from_proto
from router.intake import with_defaults
from router.openai_schema import parse_completion
from router.request import Ask, TokenPrompt
from tests.router.peers import BadDecode, serving
from tests.router.support import MODEL, VOCAB, House, bundle, house, ids_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/completions"
TEXTS = ["the cat sat", "a dog, naïvely €5", "the log"]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
IGNORE: dict[str, Any] = {"ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house(max_active=8) as it:
        yield it


async def expected(made: House, text: str) -> tuple[tuple[int, ...], str]:
    """Output ids and their text, through the router's own parts."""
    tokenizer = Tokenizer(bundle())
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = await made.router.intake.take(Ask(TokenPrompt(tokenizer.encode(text)), params))
    ids = ids_of([event async for event in made.router.orchestrator.generate(request)])
    return ids, tokenizer.decode(ids)


def events_of(lines: list[str]) -> list[Any]:
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    async with http.stream("POST", URL, json={**body, "stream": True}) as answer:
        return [line async for line in answer.aiter_lines() if line]


async def test_every_form_of_prompt_gives_one_choice_per_prompt_in_order(made: House, client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer(bundle())
    known = [await expected(made, text) for text in TEXTS]
    ids = [list(tokenizer.encode(text)) for text in TEXTS]
    forms: list[tuple[Any, int]] = [(TEXTS[0], 1), (TEXTS, 3), (ids[0], 1), (ids, 3), ([TEXTS[0], ids[1]], 2)]
    for prompt, count in forms:
        answer = await client.completions.create(**GREEDY, prompt=prompt, extra_body=IGNORE)
        assert answer.object == "text_completion" and answer.model == MODEL
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert [choice.text for choice in answer.choices] == [text for _, text in known[:count]]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens == sum(map(len, ids[:count])) and usage.completion_tokens == 12 * count
        # All of it was asked before; whole pages of four tokens are kept, and the last token is always run.
        assert usage.prompt_tokens_details.cached_tokens == sum((len(i) - 1) // 4 * 4 for i in ids[:count])


async def test_a_stream_of_several_prompts_gives_the_same_texts(made: House, client: AsyncOpenAI) -> None:
    known = [(await expected(made, text))[1] for text in TEXTS]
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            **GREEDY, prompt=TEXTS, stream=True, stream_options={"include_usage": True}, extra_body=IGNORE
        )
    ]
    texts, ends = [""] * 3, [0] * 3
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason == "length"
        assert chunk.usage is None and chunk.id == chunks[0].id
    assert (texts, ends) == (known, [1, 1, 1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 36


async def test_usage_comes_only_when_asked_for(http: httpx.AsyncClient) -> None:
    chunks = events_of(await stream(http, {**GREEDY, "prompt": TEXTS[0]}))
    assert not [chunk for chunk in chunks if "usage" in chunk or not chunk["choices"]]


async def test_the_synchronous_client(made: House) -> None:
    _, text = await expected(made, TEXTS[0])

    def talk() -> tuple[str, str]:
        with OpenAI(base_url=f"http://{made.router.http_address}/v1", api_key="none", max_retries=0) as sync:
            whole = sync.completions.create(**GREEDY, prompt=TEXTS[0], extra_body=IGNORE)
            parts = sync.completions.create(**GREEDY, prompt=TEXTS[0], extra_body=IGNORE, stream=True)
            return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in parts)

    assert await asyncio.to_thread(talk) == (text, text)


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_puts_the_prompt_before_the_output(made: House, http: httpx.AsyncClient, streamed: bool) -> None:
    tokenizer = Tokenizer(bundle())
    _, text = await expected(made, TEXTS[1])
    for prompt in (TEXTS[1], list(tokenizer.encode(TEXTS[1]))):
        body = {**GREEDY, **IGNORE, "prompt": prompt, "echo": True}
        if streamed:
            got = "".join(chunk["choices"][0]["text"] for chunk in events_of(await stream(http, body)))
        else:
            got = (await http.post(URL, json=body)).json()["choices"][0]["text"]
        assert got == TEXTS[1] + text


async def test_logprobs_have_four_lists_of_equal_length(made: House, client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer(bundle())
    ids, text = await expected(made, TEXTS[0])
    answer = await client.completions.create(**GREEDY, prompt=TEXTS[0], logprobs=2, extra_body=IGNORE)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids)
    assert len(logprobs.text_offset) == len(ids)
    for n, token in enumerate(ids):
        data = tokenizer.token_bytes(token)
        if data.isascii() and data:
            assert logprobs.tokens[n] == data.decode()
            if logprobs.text_offset[n] < len(text) and text.isascii():
                assert text[logprobs.text_offset[n] :].startswith(data.decode())
        top = logprobs.top_logprobs[n]
        assert len(top) == 2 and max(top.values()) == top[logprobs.tokens[n]] == logprobs.token_logprobs[n] <= 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_ids_come_when_asked_for(made: House, http: httpx.AsyncClient, streamed: bool) -> None:
    ids, _ = await expected(made, TEXTS[0])
    body = {**GREEDY, **IGNORE, "prompt": TEXTS[0], "return_token_ids": True}
    if streamed:
        chunks = events_of(await stream(http, body))
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == list(ids)
    else:
        assert (await http.post(URL, json=body)).json()["choices"][0]["token_ids"] == list(ids)


async def test_without_a_limit_there_are_sixteen_tokens_as_openai_has_it(client: AsyncOpenAI) -> None:
    for given, count in (({}, 16), ({"min_tokens": 20}, 20)):
        body: dict[str, Any] = {**IGNORE, **given}
        answer = await client.completions.create(model=MODEL, prompt=TEXTS[0], temperature=0, extra_body=body)
        assert answer.usage is not None and answer.usage.completion_tokens == count


async def test_many_token_ids_are_no_body_of_too_many_entries(http: httpx.AsyncClient) -> None:
    answer = await http.post(URL, json={**GREEDY, "prompt": [5] * 30_000})
    assert answer.json()["error"]["code"] == "prompt_too_long"  # which the context's business is, not the parser's
    answer = await http.post(URL, json={**GREEDY, "prompt": [[5] * 30_000, ["x"] * 30_000]})
    assert answer.json()["error"]["code"] == "too_many_entries"


BAD = [
    ({"prompt": ...}, "prompt", "missing_field"),
    ({"prompt": None}, "prompt", "invalid_field"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": [[]]}, "prompt", "empty_prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_field"),
    ({"prompt": [1, True]}, "prompt[1]", "invalid_field"),
    ({"prompt": [[1], 2]}, "prompt[1]", "invalid_field"),
    ({"prompt": [[1], [2.5]]}, "prompt[1][0]", "invalid_field"),
    ({"prompt": [-1]}, "prompt", "token_out_of_range"),
    ({"prompt": [VOCAB]}, "prompt", "token_out_of_range"),
    ({"prompt": [1 << 70]}, "prompt[0]", "invalid_field"),
    ({"prompt": ["a"] * 129}, "prompt", "too_many_prompts"),
    ({"prompt": [1] * 4000}, "prompt", "prompt_too_long"),
    ({"echo": True, "logprobs": 1}, "echo", "prompt_logprobs"),
    ({"logprobs": 21}, "logprobs", "invalid_logprobs"),
    ({"logprobs": True}, "logprobs", "invalid_field"),
    ({"suffix": "end"}, "suffix", "unknown_field"),
    ({"best_of": 2}, "best_of", "invalid_field"),
    ({"max_tokens": 0}, "max_tokens", "invalid_max_tokens"),
    ({"messages": []}, "messages", "unknown_field"),
    ({"prompt": ["a", "b"], "pdserve_record": True}, "pdserve_record", "invalid_field"),
    ({"temperature": -1}, "temperature", "invalid_temperature"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=[json.dumps(b[0], default=str)[:40] for b in BAD])
async def test_bad_input_is_one_clear_error(
    http: httpx.AsyncClient, change: dict[str, Any], param: str, code: str, streamed: bool
) -> None:
    body = {**GREEDY, "prompt": "the cat", "stream": streamed} | change
    answer = await http.post(URL, json={name: value for name, value in body.items() if value is not ...})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


async def test_one_bad_prompt_among_good_ones_refuses_them_all_before_any_work(
    made: House, client: AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**GREEDY, prompt=[[1, 2, 3], [VOCAB]])
    assert caught.value.code == "token_out_of_range"
    assert made.router.orchestrator.active == 0


async def test_more_prompts_than_the_router_takes_are_refused_and_nothing_is_held(
    made: House, client: AsyncOpenAI
) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(**GREEDY, prompt=["the cat"] * 9)
    assert caught.value.code == "router_full"
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_one_prompt_that_breaks_ends_the_stream_with_an_error_and_no_done(
    made: House, http: httpx.AsyncClient
) -> None:
    bad = BadDecode(made.decodes[0].contract, tokens=3, end=Internal("it broke"))
    async with serving(bad) as address:
        await made.add_ghost("bad", DECODE, address)
        busy = made.make_look_busy("d0")
        lines = await stream(http, {**GREEDY, "prompt": TEXTS[:2], "max_tokens": 100, **IGNORE})
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "internal" and "data: [DONE]" not in lines
    assert not [line for line in lines if '"finish_reason":"' in line]
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_a_client_that_leaves_a_stream_of_several_prompts_stops_all_work(
    made: House, http: httpx.AsyncClient
) -> None:
    body = {**GREEDY, **IGNORE, "prompt": TEXTS, "max_tokens": 200, "stream": True}
    async with http.stream("POST", URL, json=body) as answer:
        async for line in answer.aiter_lines():
            if '"text"' in line:
                break
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_options_left_out_have_the_models_own_defaults(made: House) -> None:
    stated = {"temperature": 0.5, "top_k": 7.0, "repetition_penalty": 1.25}
    tokenizer = Tokenizer(dataclasses.replace(bundle(), sampling=stated))
    for body, expected in (
        ({}, SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.25, max_tokens=16)),
        ({"temperature": 1, "top_k": -1}, SamplingParams(repetition_penalty=1.25, max_tokens=16)),
    ):
        (ask,) = parse_completion(json.dumps({"model": MODEL, "prompt": "a", **body}).encode()).asks()
        assert with_defaults(ask, tokenizer) == expected
        assert with_defaults(ask, None) == ask.sampling
    asked = gateway_pb2.GenerateRequest(text="a", sampling={"top_k": 0})
    assert with_defaults(asks_from_proto(asked, None)[0], tokenizer) == SamplingParams(
        temperature=0.5, repetition_penalty=1.25
    )
    sent, _ = build("a", {"temperature": 1.0})  # the client leaves open what its caller does
    assert asks_from_proto(sent, None)[0].unset == SAMPLING_NAMES - {"temperature"}
