"""Tools, and output that fits a grammar, through OpenAI's client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequest
from pdserve.tokenizer import Tokenizer
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from tests.router.support import ENGINE, MODEL, REGISTRY, VOCAB, model, router_settings
from tests.router.tools import HERMES_TEMPLATE, TOOLS, with_template

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_field"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_field"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "unknown_field"),
    ({"tools": TOOLS[:1] * 2}, "tools", "invalid_field"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_field",
    ),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "invalid_field"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_field",
    ),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses() -> AsyncIterator[tuple[str, str]]:
    """HTTP and gRPC of a router and a pair of workers whose model's template takes tools."""
    made = with_template(HERMES_TEMPLATE)
    router = Router(router_settings())
    await router.start()
    common: dict[str, Any] = {"name": MODEL, "engine": ENGINE, "registry": REGISTRY}
    big = model(context=1024)
    engine = dataclasses.replace(ENGINE, pages=256)
    workers: list[PrefillWorker | DecodeWorker] = [
        PrefillWorker(big, made, PrefillSettings(**{**common, "worker_id": "p", "engine": engine}), router.registry),
        DecodeWorker(big, made, DecodeSettings(**{**common, "worker_id": "d", "engine": engine}), router.registry),
    ]
    try:
        for worker in workers:
            await worker.start()
        await router.pool.refresh()
        yield router.http_address, router.address
        for worker in workers:
            assert worker.blocks.held_count == 0
    finally:
        for worker in workers:
            await worker.stop()
        await router.stop()


@pytest.fixture(scope="module")
def address(addresses: tuple[str, str]) -> str:
    return addresses[0]


@pytest.fixture(scope="module")
def grpc_address(addresses: tuple[str, str]) -> str:
    return addresses[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=20) as it:
        yield it


module_loop = pytest.mark.asyncio(loop_scope="module")
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "seed": 3, "max_tokens": 300}


@module_loop
async def test_a_required_call_whole_and_streamed_and_its_result_sent_back(client: AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    options: Any = {**ASK, "tools": TOOLS, "tool_choice": named}
    answer = await client.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])

    pieces = []
    async with client.chat.completions.stream(**options) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                assert event.name == "weather"
                pieces.append(event.arguments_delta)
        final = await stream.get_final_completion()
    again = final.choices[0].message.tool_calls
    assert again is not None and again[0].function.arguments == "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 5  # as the model wrote it
    assert json.loads(again[0].function.arguments) == json.loads(call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls" and not final.choices[0].message.content

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*ASK["messages"], choice.message.model_dump(exclude_none=True), result]
    after = await client.chat.completions.create(**{**options, "messages": history, "tool_choice": "none"})
    assert after.choices[0].finish_reason in ("stop", "length") and after.choices[0].message.tool_calls is None


@module_loop
@pytest.mark.parametrize(("change", "param", "code"), BAD, ids=[b[1] for b in BAD])
async def test_bad_tools_are_refused_by_name(address: str, change: dict[str, Any], param: str, code: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"http://{address}/v1/chat/completions", json={**ASK, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


@module_loop
@pytest.mark.parametrize("streamed", [False, True])
async def test_json_that_fits_a_schema(client: AsyncOpenAI, streamed: bool) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    if streamed:
        chunks = await client.chat.completions.create(**ASK, response_format=wanted, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    else:
        answer = await client.chat.completions.create(**ASK, response_format=wanted)
        text = answer.choices[0].message.content or ""
        assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), schema)


@module_loop
async def test_other_forms_of_output(client: AsyncOpenAI) -> None:
    for options, expected in (
        ({"response_format": {"type": "regex", "regex": "[xyz]{5}"}}, "[xyz]{5}"),
        ({"response_format": {"type": "grammar", "grammar": 'start: "no" | "never"'}}, "no|never"),
        ({"structured_outputs": {"choice": ["red", 'bl"ue']}}, 'red|bl"ue'),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"grammar": 'start: "up" | "down"'}}, "up|down"),
        ({"structured_outputs": {"json": {"enum": ["ab", 7]}}}, '"ab"|7'),
    ):
        text = await client.completions.create(model=MODEL, prompt="It is", max_tokens=20, extra_body=options)
        jsonschema.validate(text.choices[0].text, {"type": "string", "pattern": f"^({expected})$"})
        chat = await client.chat.completions.create(**ASK, extra_body=options)
        jsonschema.validate(chat.choices[0].message.content, {"type": "string", "pattern": f"^({expected})$"})


@module_loop
async def test_an_answer_goes_on_within_the_last_message(client: AsyncOpenAI, address: str) -> None:
    begun: Any = [*ASK["messages"], {"role": "assistant", "content": "It will "}]
    tokenizer = Tokenizer(with_template(HERMES_TEMPLATE))
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        body = {"messages": begun, "continue_final_message": True}
        ids = (await http.post("/tokenize", json=body)).json()["tokens"]
        assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|assistant|>It will ")
        back = await http.post("/detokenize", json={"tokens": ids})
        assert back.json()["prompt"] == tokenizer.decode(ids)
        plain = (await http.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True})).json()
        assert plain["tokens"] == list(tokenizer.encode("the cat")) and "".join(plain["token_strs"]) == "the cat"
        assert (plain["count"], plain["max_model_len"]) == (len(plain["tokens"]), 1024)
        for path, wrong, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
            ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ):
            answer = await http.post(path, json=wrong)
            assert answer.json()["error"]["param"] == param
    answer = await client.chat.completions.create(
        **{**ASK, "messages": begun, "max_tokens": 2}, extra_body={"continue_final_message": True}
    )
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


@module_loop
async def test_the_grpc_gateway_takes_the_same_options(grpc_address: str, client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer(with_template(HERMES_TEMPLATE))
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages: Any = [
        {"role": "user", "content": "When?", "name": "ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is "},
    ]
    schema = TOOLS[0]["function"]["parameters"]
    async with AsyncClient(grpc_address) as it:
        answer = await it.complete(
            messages=messages, tools=TOOLS, continue_final_message=True, json_schema=schema, max_tokens=300, seed=1
        )
        expected = tokenizer.apply_chat(messages, tools=TOOLS, continue_final_message=True, add_generation_prompt=False)
        assert answer.usage.prompt_tokens == len(expected)
        jsonschema.validate(json.loads(answer.text), schema)
        assert (await it.complete("a", regex="x{3}")).text == "xxx"
        assert (await it.complete("a", lark='start: "yes"')).text == "yes"
        with pytest.raises(InvalidRequest, match="regex"):
            await it.complete("a", regex="[a-")
        with pytest.raises(InvalidRequest, match="together"):
            await it.complete("a", regex="a", lark="b")
        with pytest.raises(InvalidRequest, match="tools"):
            await it.complete("a", tools=TOOLS)


@module_loop
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_a_call_that_has_to_come_comes_through_both_doors(
    grpc_address: str, client: AsyncOpenAI, choice: Any
) -> None:
    """The model's weights are random: without the grammar there would be none."""
    options: Any = {**ASK, "tools": TOOLS, "tool_choice": choice}
    answer = await client.chat.completions.create(**options, parallel_tool_calls=False)
    async with AsyncClient(grpc_address) as it:
        ours = await it.complete(**options, parallel_tool_calls=False)
    for found in (answer.choices[0].message.tool_calls or []), ours.tool_calls:
        (call,) = [getattr(call, "function", call) for call in found]
        (tool,) = [t for t in TOOLS if t["function"]["name"] == call.name]
        jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])
        assert choice == "required" or call.name == "weather"
    assert answer.choices[0].finish_reason == ours.finish.reason == "tool_calls" and not ours.text


@module_loop
async def test_variables_reach_the_template_and_cannot_take_its_own_names(address: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        plain = (await http.post("/tokenize", json=body)).json()["tokens"]
        same = (await http.post("/tokenize", json={**body, "chat_template_kwargs": {"mood": [1]}})).json()["tokens"]
        assert plain == same
        wrong = await http.post("/tokenize", json={**body, "chat_template_kwargs": {"messages": []}})
        assert wrong.json()["error"]["param"] == "chat_template_kwargs.messages"
