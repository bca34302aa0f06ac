"""The OpenAI HTTP API, through the official client and as raw HTTP, in front of real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from pdserve.errors import Internal
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.tokenizer import Tokenizer
from router.request import Ask, ChatPrompt
from tests.router.peers import BadDecode, BadPrefill, serving
from tests.router.support import CONTEXT, MODEL, VOCAB, House, bundle, house, ids_of, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "the cat sat on the mat, naïvely €5"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
IGNORE: dict[str, Any] = {"ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house(max_body_bytes=100_000) as it:
        yield it


async def expected(made: House, max_tokens: int, **sampling: Any) -> tuple[tuple[int, ...], str]:
    """Ids and text of the same request through the router's own parts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    request = await made.router.intake.take(Ask(ChatPrompt(tuple(MESSAGES)), params))
    events = [event async for event in made.router.orchestrator.generate(request)]
    ids = ids_of(events)
    return ids, Tokenizer(bundle()).decode(ids)


async def test_a_whole_completion(made: House, client: AsyncOpenAI) -> None:
    _, text = await expected(made, 20)
    answer = await client.chat.completions.create(**GREEDY, max_tokens=20, extra_body=IGNORE)
    assert answer.object == "chat.completion" and answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    prompt = len(Tokenizer(bundle()).apply_chat(MESSAGES))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 20, prompt + 20)
    # `expected` has warmed the caches; they keep whole pages of four tokens, and the last token is always run.
    assert usage.prompt_tokens_details.cached_tokens == (prompt - 1) // 4 * 4 > 0


async def test_a_stream_gives_the_same_text_and_usage_when_asked(made: House, client: AsyncOpenAI) -> None:
    _, text = await expected(made, 30)
    stream = await client.chat.completions.create(
        **GREEDY, max_completion_tokens=30, extra_body=IGNORE, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_synchronous_client(made: House) -> None:
    _, text = await expected(made, 12)

    def talk() -> tuple[str, str, list[str]]:
        with OpenAI(base_url=f"http://{made.router.http_address}/v1", api_key="none", max_retries=0) as sync:
            whole = sync.chat.completions.create(**GREEDY, max_tokens=12, extra_body=IGNORE)
            stream = sync.chat.completions.create(**GREEDY, max_tokens=12, extra_body=IGNORE, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", streamed, [m.id for m in sync.models.list()]

    assert await asyncio.to_thread(talk) == (text, text, [MODEL])


async def test_logprobs_and_top_logprobs(made: House, client: AsyncOpenAI) -> None:
    ids, _ = await expected(made, 5)
    answer = await client.chat.completions.create(
        **GREEDY, max_tokens=5, logprobs=True, top_logprobs=3, extra_body=IGNORE
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    tokenizer = Tokenizer(bundle())
    assert [bytes(entry.bytes or []) for entry in logprobs.content] == [tokenizer.token_bytes(i) for i in ids]
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0  # greedy takes the best
        assert sorted((t.logprob for t in entry.top_logprobs), reverse=True) == [t.logprob for t in entry.top_logprobs]
    plain = await client.chat.completions.create(**GREEDY, max_tokens=2, logprobs=True, extra_body=IGNORE)
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content] == [[], []]


async def test_logit_bias_stop_and_seed(made: House, client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer(bundle())
    (letter,) = tokenizer.encode("Z")
    answer = await client.chat.completions.create(**GREEDY, max_tokens=6, logit_bias={str(letter): 100})
    assert answer.choices[0].message.content == "ZZZZZZ"
    (a, b) = (tokenizer.encode(text)[0] for text in ("Q", "#"))
    stopped = await client.chat.completions.create(
        **{**GREEDY, "temperature": 1}, seed=3, max_tokens=200, logit_bias={str(a): 100, str(b): 99}, stop=["#"]
    )
    content = stopped.choices[0].message.content or ""
    assert stopped.choices[0].finish_reason == "stop" and set(content) <= {"Q"}
    hot = {**GREEDY, "temperature": 1.0, "max_tokens": 16, "extra_body": IGNORE}
    first, again, other = [await client.chat.completions.create(**hot, seed=seed) for seed in (11, 11, 12)]
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content


async def test_max_tokens_defaults_to_what_the_context_leaves_and_is_cut_to_it(client: AsyncOpenAI) -> None:
    for limit in ({}, {"max_tokens": 100_000}):
        options: Any = GREEDY | limit
        answer = await client.chat.completions.create(**options, extra_body=IGNORE)
        assert answer.usage is not None and answer.usage.total_tokens == CONTEXT


async def test_models(made: House, client: AsyncOpenAI) -> None:
    (listed,) = (await client.models.list()).data
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "pdserve")
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-none")
    assert caught.value.code == "model_not_found" and MODEL in str(caught.value)


BAD = [
    ({"model": "unknown"}, 404, "model", "model_not_found"),
    ({"model": ...}, 400, "model", "missing_field"),
    ({"messages": []}, 400, "messages", "empty_prompt"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "invalid_messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "messages[0].content[0]", "invalid_field"),
    ({"messages": [{"role": "user", "content": "hi", "weight": 1}]}, 400, "messages[0].weight", "unknown_field"),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, 400, "prompt", "prompt_too_long"),
    ({"frequency": 1}, 400, "frequency", "unknown_field"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing_field"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "no_tools"),
    ({"tool_choice": "required"}, 400, "tool_choice", "invalid_field"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "invalid_field"),
    ({"response_format": {"type": "regex", "regex": "[a-"}}, 400, "regex", "invalid_grammar"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_field"),
    ({"store": True}, 400, "store", "unknown_field"),
    ({"temperature": -1}, 400, "temperature", "invalid_temperature"),
    ({"temperature": "hot"}, 400, "temperature", "invalid_field"),
    ({"top_p": 0}, 400, "top_p", "invalid_top_p"),
    ({"top_k": -5}, 400, "top_k", "invalid_top_k"),
    ({"min_p": 2}, 400, "min_p", "invalid_min_p"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "invalid_presence_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_repetition_penalty"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "invalid_field"),
    ({"min_tokens": 9999}, 400, "min_tokens", "invalid_min_tokens"),
    ({"n": 0}, 400, "n", "invalid_n"),
    ({"n": 129}, 400, "n", "invalid_n"),
    ({"stop": [""]}, 400, "stop", "invalid_stop"),
    ({"stop": ["x"] * 17}, 400, "stop", "invalid_stop"),
    ({"stop_token_ids": [VOCAB]}, 400, "stop_token_ids", "invalid_stop_token_ids"),
    ({"logit_bias": {"abc": 1}}, 400, "logit_bias", "invalid_field"),
    ({"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias", "invalid_logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias", "invalid_logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_field"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "invalid_field"),
    ({"seed": -1}, 400, "seed", "invalid_seed"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_field"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "unknown_field"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "param", "code"), BAD, ids=[json.dumps(b[0], default=str)[:40] for b in BAD]
)
async def test_bad_input_is_one_clear_error(
    http: httpx.AsyncClient, change: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    body = {**GREEDY, "stream": stream} | change
    if "stream_options" in change:
        body["stream"] = change.get("stream", False)
    body = {name: value for name, value in body.items() if value is not ...}
    answer = await http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error" and error["message"]


async def test_bodies_that_are_no_json_or_too_large(http: httpx.AsyncClient) -> None:
    url = "/v1/chat/completions"
    broken = await http.post(url, content=b"{nope")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    nan = await http.post(url, content=json.dumps({**GREEDY, "temperature": float("nan")}))
    assert (nan.status_code, nan.json()["error"]["param"]) == (400, "temperature")
    large = await http.post(url, content=b"x" * 100_001)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


async def test_other_paths_and_methods_have_the_same_error_shape(http: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_answers_can_be_sent_back_as_the_client_holds_them(client: AsyncOpenAI) -> None:
    first = await client.chat.completions.create(**GREEDY, max_tokens=3, extra_body=IGNORE)
    history = [*MESSAGES, first.choices[0].message.model_dump(), *MESSAGES]
    second = await client.chat.completions.create(**{**GREEDY, "messages": history}, max_tokens=3)
    assert second.choices


async def test_a_failure_in_the_middle_is_an_error_event_and_no_done(made: House, http: httpx.AsyncClient) -> None:
    bad = BadDecode(made.decodes[0].contract, tokens=3, end=Internal("it broke"))
    async with serving(bad) as address:
        await made.add_ghost("bad", DECODE, address)
        busy = made.make_look_busy("d0")
        async with http.stream("POST", "/v1/chat/completions", json={**GREEDY, "stream": True}) as answer:
            events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    assert answer.status_code == 200
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "xxx"
    assert json.loads(events[-1])["error"]["code"] == "internal"
    assert "[DONE]" not in events


async def test_a_failure_before_the_first_token_has_its_own_status(made: House, http: httpx.AsyncClient) -> None:
    peer = BadPrefill(Internal("it broke"))
    async with serving(peer) as address:
        await made.add_ghost("bad", PREFILL, address)
        busy = made.make_look_busy("p0")
        answer = await http.post("/v1/chat/completions", json={**GREEDY, "stream": True})
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_the_work(made: House, http: httpx.AsyncClient, stream: bool) -> None:
    peer = BadPrefill()
    async with serving(peer) as address:
        await made.add_ghost("hangs", PREFILL, address)
        busy = made.make_look_busy("p0")
        post = asyncio.create_task(http.post("/v1/chat/completions", json={**GREEDY, "stream": stream}))
        async with asyncio.timeout(5):
            await peer.called.wait()
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        async with asyncio.timeout(5):
            await peer.cancelled.wait()
        made.router.pool.end(busy)
        await made.remove_ghost("hangs")
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_a_client_that_leaves_a_stream_stops_the_work(made: House, http: httpx.AsyncClient) -> None:
    body = {**GREEDY, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if '"content"' in line:
                break
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_health_and_readiness(made: House, http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).status_code == 200
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["models"]) == (200, [MODEL])


async def test_readiness_and_the_error_name_what_does_not_fit() -> None:
    async with house(decodes=0) as unfit, httpx.AsyncClient() as raw:
        url = f"http://{unfit.router.http_address}"
        assert (await raw.get(f"{url}/healthz")).status_code == 200
        assert (await raw.get(f"{url}/readyz")).status_code == 503
        answer = await raw.post(f"{url}/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_worker")
        await unfit.add_decode("stranger", of=model(seed=1))
        answer = await raw.get(f"{url}/readyz")
        assert answer.status_code == 503 and "MODEL_DIGEST" in answer.text
        answer = await raw.post(f"{url}/v1/chat/completions", json=GREEDY)
        assert answer.status_code == 409
        assert answer.json()["error"]["differences"][0]["code"] == "MODEL_DIGEST"
