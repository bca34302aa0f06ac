"""Tool calls: read off the three forms that models write, made to come where they must, through OpenAI's client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer as Backend

from decode_worker.generation import Generation
from decode_worker.grammar import Grammars
from decode_worker.sampling import Choice, sample
from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequest
from pdserve.request import SamplingParams
from pdserve.tokenizer import Bundle, Tokenizer
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.app import Router
from router.openai_messages import NamedTool, tool_use
from router.tool_formats import FORMATS, ToolFormat, format_of
from router.tool_readers import Call, Reader
from tests.router.support import ENGINE, MODEL, REGISTRY, VOCAB, bundle, model, router_settings

HERMES, ARGS, MISTRAL, LLAMA3 = FORMATS
NAMES = frozenset({"weather", "add"})
WEATHER = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
ADD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}</tool"}]}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
HERMES_TEMPLATE = (
    "{% if tools %}<|s|>You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}. Answer with <tool_call>"
    '{"name": ..., "arguments": ...}</tool_call>.{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
MISTRAL_TEMPLATE = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages }}[TOOL_CALLS]"
ARGS_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages }}[TOOL_CALLS]name[ARGS]{...}"
)
LLAMA3_TEMPLATE = (
    '{% if tools %}Answer as {"name": function name, "parameters": dictionary of argument name and its value}.'
    "{{ tools | tojson }}{% endif %}{{ messages }}"
)


def read(reader: Reader, pieces: Iterator[str] | list[str]) -> tuple[str, list[Call]]:
    told = [*map(reader.push, pieces), reader.close()]
    calls: list[Call] = []
    for part in (part for _, parts in told for part in parts):
        if part.name is not None:
            calls.append(Call(part.name, ""))
        calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return "".join(text for text, _ in told), calls


def calls_of(*values: dict[str, Any]) -> list[Call]:
    return [Call(value["name"], json.dumps(value["arguments"])) for value in values]


def tagged(value: Any) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def llama(value: dict[str, Any]) -> str:
    return json.dumps({"name": value["name"], "parameters": value["arguments"]})


def args(value: dict[str, Any], between: str = "[ARGS]") -> str:
    return f"[TOOL_CALLS]{value['name']}{between}{json.dumps(value['arguments'])}"


UNKNOWN = {"name": "delete", "arguments": {}}
TURNED = {"arguments": WEATHER["arguments"], "name": "weather"}  # the name comes last: read once it is whole
TAGS_IN = {"name": "add", "arguments": {"a": '"}]</tool_call>[TOOL_CALLS]; {"'}}
OUTPUTS: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "It is 5 < 6.", "It is 5 < 6.", []),
    (HERMES, tagged(WEATHER), "", calls_of(WEATHER)),
    (HERMES, f"I look.\n\n{tagged(WEATHER)}\n{tagged(ADD)}\n", "I look.", calls_of(WEATHER, ADD)),
    (HERMES, f"a {tagged(WEATHER)}\n b", "ab", calls_of(WEATHER)),
    (HERMES, f"<tool_call>{json.dumps(WEATHER)}", "", calls_of(WEATHER)),  # the end's marker was not written
    (HERMES, '<tool_call>\n{"name": "weather", "argu', '<tool_call>\n{"name": "weather", "argu', []),
    (HERMES, f"{tagged(UNKNOWN)} x", f"{tagged(UNKNOWN)} x", []),
    (HERMES, "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    (HERMES, "text <tool_ca", "text <tool_ca", []),
    (MISTRAL, "plain [TOOL", "plain [TOOL", []),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([WEATHER, ADD])}", "", calls_of(WEATHER, ADD)),
    (MISTRAL, f"Yes. [TOOL_CALLS] {json.dumps([ADD])}", "Yes.", calls_of(ADD)),
    (MISTRAL, "[TOOL_CALLS][{]", "[TOOL_CALLS][{]", []),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([UNKNOWN])}", f"[TOOL_CALLS]{json.dumps([UNKNOWN])}", []),
    (LLAMA3, "Hello {world}", "Hello {world}", []),
    (LLAMA3, llama(WEATHER), "", calls_of(WEATHER)),
    (LLAMA3, f"<|python_tag|>{llama(WEATHER)}; {llama(ADD)}", "", calls_of(WEATHER, ADD)),
    (LLAMA3, '{"not": "a call"}', '{"not": "a call"}', []),
    (LLAMA3, f"{llama(WEATHER)} and more", "} and more", calls_of(WEATHER)),  # it had begun before that was known
    (HERMES, tagged(TURNED), "", calls_of(WEATHER)),
    (HERMES, f"{tagged(TAGS_IN)}{tagged(ADD)}", "", calls_of(TAGS_IN, ADD)),
    (HERMES, f"<tool_call>{json.dumps(WEATHER)} x", "} x", calls_of(WEATHER)),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1, ', "", [Call("add", '{"a": [1, ')]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {a}}</tool_call>.',
        '<tool_call>{"name": "add", "arguments": {a}}</tool_call>.',
        [],
    ),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([TURNED, ADD])}", "", calls_of(WEATHER, ADD)),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([TAGS_IN, ADD])}", "", calls_of(TAGS_IN, ADD)),
    (MISTRAL, f"[TOOL_CALLS]{json.dumps([ADD])} x", "}] x", calls_of(ADD)),
    (ARGS, args(WEATHER), "", calls_of(WEATHER)),
    (ARGS, f"I look. {args(WEATHER)}{args(ADD)}", "I look.", calls_of(WEATHER, ADD)),
    (ARGS, f"{args(TAGS_IN, '[CALL_ID]aB3[ARGS]')} {args(ADD)}\n", "", calls_of(TAGS_IN, ADD)),
    (ARGS, f"{args(UNKNOWN)} x", f"{args(UNKNOWN)} x", []),
    (ARGS, "[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]weather[ARGS]", []),
    (ARGS, "no [TOOL_CALL", "no [TOOL_CALL", []),
    (LLAMA3, f"{llama(TAGS_IN)};{llama(ADD)} ;", "", calls_of(TAGS_IN, ADD)),
]


@pytest.mark.parametrize(
    ("form", "output", "text", "calls"), OUTPUTS, ids=[f"{o[0].name}-{o[1][:24]}" for o in OUTPUTS]
)
def test_calls_are_read_however_the_output_is_divided_and_all_else_stays_text(
    form: ToolFormat, output: str, text: str, calls: list[Call]
) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [output[n : n + size] for n in range(0, len(output), size)]
        assert read(form.reader(NAMES), pieces) == (text, calls)


def test_the_form_is_told_by_the_template() -> None:
    assert format_of(HERMES_TEMPLATE) is HERMES
    assert format_of(MISTRAL_TEMPLATE) is MISTRAL
    assert format_of(ARGS_TEMPLATE) is ARGS
    assert format_of(LLAMA3_TEMPLATE) is LLAMA3
    assert format_of("{{ messages }}") is None


def with_template(template: str, special: str = "") -> Bundle:
    plain = bundle()
    if special:
        backend = Backend.from_str(plain.tokenizer_json)
        backend.add_special_tokens(special.split())
        plain = dataclasses.replace(
            plain, tokenizer_json=backend.to_str(), vocab_size=backend.get_vocab_size(with_added_tokens=True)
        )
    return dataclasses.replace(plain, chat_template=template)


CASES = [
    (HERMES, HERMES_TEMPLATE, ""),
    (HERMES, HERMES_TEMPLATE, "<tool_call>"),
    (MISTRAL, MISTRAL_TEMPLATE, "[TOOL_CALLS]"),
    (ARGS, ARGS_TEMPLATE, "[TOOL_CALLS]"),
    (ARGS, ARGS_TEMPLATE, "[TOOL_CALLS] [ARGS]"),
    (LLAMA3, LLAMA3_TEMPLATE, "<|python_tag|>"),
]


@pytest.mark.parametrize(("form", "template", "special"), CASES, ids=[f"{c[0].name} {c[2]}" for c in CASES])
@pytest.mark.parametrize("choice", ["required", "named", "single"])
def test_required_calls_come_whatever_the_model_says_and_fit_their_parameters(
    form: ToolFormat, template: str, special: str, choice: str
) -> None:
    tokenizer = Tokenizer(with_template(template, special))
    body = {"type": "function", "function": {"name": "weather"}}
    use = tool_use(TOOLS, "required" if choice != "named" else NamedTool.model_validate(body), choice != "single")
    assert use is not None
    params = use.adapt(tokenizer, SamplingParams(seed=5, temperature=1.0))
    assert params.skip_special_tokens == (not special)  # a marker that is one has to be seen
    rng = np.random.default_rng(1)
    made = Generation((1,), params, 4000, (), tokenizer, Grammars(tokenizer, tokenizer.vocab_size))
    output = b""
    while made.finish is None:
        (chosen,) = sample([(made.sampler, torch.from_numpy(rng.normal(size=tokenizer.vocab_size)))])
        assert isinstance(chosen, Choice), chosen
        output += made.accept(chosen).text
    if made.finish.reason == "length":
        return  # it went on calling for ever
    text, calls = read(form.reader(use.names), [output.decode()])
    assert text == "" and calls
    assert choice == "required" or len(calls) == 1
    for call in calls:
        (tool,) = [t for t in TOOLS if t["function"]["name"] == call.name]
        jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])
        assert choice != "named" or call.name == "weather"


def test_strict_arguments_leave_the_text_around_free() -> None:
    tokenizer = Tokenizer(with_template(HERMES_TEMPLATE))
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    use = tool_use(strict, "auto", None)
    assert use is not None
    params = use.adapt(tokenizer, SamplingParams(temperature=0, seed=0))
    assert params.grammar is not None
    constraint = Grammars(tokenizer, VOCAB).start(params.grammar)
    spoken = 'Any text {"a": 1}, then <tool_call>\n{"name": "weather", "arguments": {"city": "'
    for token in tokenizer.encode(spoken):
        assert constraint.allowed()[token]
        constraint.advance(token)
    for token in tokenizer.encode('Oslo", "days": '):
        assert constraint.allowed()[token]
        constraint.advance(token)
    allowed = constraint.allowed()
    assert allowed[tokenizer.encode("2")[0]] and not allowed[tokenizer.encode("7")[0]]
    with pytest.raises(InvalidRequest, match="strict"):
        use.adapt(Tokenizer(with_template(MISTRAL_TEMPLATE)), SamplingParams())


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
async def test_variables_reach_the_template_and_cannot_take_its_own_names(address: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        plain = (await http.post("/tokenize", json=body)).json()["tokens"]
        same = (await http.post("/tokenize", json={**body, "chat_template_kwargs": {"mood": [1]}})).json()["tokens"]
        assert plain == same
        wrong = await http.post("/tokenize", json={**body, "chat_template_kwargs": {"messages": []}})
        assert wrong.json()["error"]["param"] == "chat_template_kwargs.messages"
