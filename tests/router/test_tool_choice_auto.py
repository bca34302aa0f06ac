"""Calls that a model chooses to make, in every form that is read: OpenAI's client and ours, whole and streamed.

The workers say what a test has written, so what is expected is what the test's author wrote, never our own output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer as Backend

from pdserve.client import AsyncClient, Client
from pdserve.errors import Internal
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from router.app import Router
from tests.router.scripted import ScriptedDecode, scripted
from tests.router.tool_forms import DAMAGED, FORMS, NOW, TEMPLATES, WEATHER, WRITTEN, Call
from tests.router.tools import TOOLS, with_template

pytestmark = pytest.mark.asyncio(loop_scope="module")


NAMES = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
MESSAGES: Any = [{"role": "user", "content": "Is it warm in Zürich?"}]


@pytest.fixture(scope="module")
def peers() -> dict[str, ScriptedDecode]:
    made = {name: with_template(template, special) for name, (template, special) in TEMPLATES.items()}
    return {name: ScriptedDecode(dataclasses.replace(it, special_tokens=NAMES)) for name, it in made.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(peers: dict[str, ScriptedDecode]) -> AsyncIterator[Router]:
    async with scripted(peers) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(router: Router) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{router.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as it:
        yield it


def asking(form: str, **changes: Any) -> dict[str, Any]:
    return {"model": form, "messages": MESSAGES, "tools": TOOLS} | changes


def read_calls(message: Any) -> list[Call]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def check_ids(form: str, ids: list[str]) -> None:
    assert len(set(ids)) == len(ids)
    for given in ids:  # templates of Mistral's models refuse others
        assert len(given) == 9 if form in ("mistral", "args") else given.startswith("call_")


@pytest.mark.parametrize("form", FORMS)
async def test_text_and_two_calls_whole_and_streamed(
    form: str, peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    spoken = "" if form == "llama3" else "Ich schaue nach. "  # there a call is the whole answer
    peers[form].says = [spoken + WRITTEN[form](WEATHER, NOW)]
    whole = (await client.chat.completions.create(**asking(form))).choices[0]
    assert read_calls(whole.message) == [WEATHER, NOW]
    assert (whole.message.content or "").rstrip() == spoken.rstrip()
    assert (whole.message.content is None) == (not spoken) and whole.finish_reason == "tool_calls"
    check_ids(form, [call.id for call in whole.message.tool_calls or []])

    texts, reasons, begun, pieces = [], [], [], {0: [""], 1: [""]}
    async for chunk in await client.chat.completions.create(**asking(form), tool_choice="auto", stream=True):
        (choice,) = chunk.choices
        texts.append(choice.delta.content or "")
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:  # only the first piece of a call has its id, type and name
                begun.append((call.index, call.type, call.function.name))
                check_ids(form, [call.id])
            else:
                assert call.function.name is None and call.type is None
            pieces[call.index].append(call.function.arguments or "")
    assert begun == [(0, "function", "weather"), (1, "function", "now")]
    assert ["".join(pieces[0]), "".join(pieces[1])] == [WEATHER[1], NOW[1]]
    assert len([piece for piece in pieces[0] if piece]) > 5  # as the model writes them
    assert "".join(texts).rstrip() == spoken.rstrip()
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


@pytest.mark.parametrize("form", FORMS)
async def test_openais_own_adding_up_of_a_stream_and_its_synchronous_client(
    form: str, peers: dict[str, ScriptedDecode], client: AsyncOpenAI, router: Router
) -> None:
    peers[form].says = [WRITTEN[form](NOW, WEATHER)]
    async with client.chat.completions.stream(**asking(form)) as stream:
        final = await stream.get_final_completion()
    assert read_calls(final.choices[0].message) == [NOW, WEATHER]
    assert final.choices[0].finish_reason == "tool_calls" and not final.choices[0].message.content

    def talk() -> Any:
        with OpenAI(base_url=f"http://{router.http_address}/v1", api_key="none", max_retries=0) as sync:
            return sync.chat.completions.create(**asking(form)).choices[0]

    answer = await asyncio.to_thread(talk)
    assert read_calls(answer.message) == [NOW, WEATHER] and answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(("form", "said"), [(form, said) for form, every in DAMAGED.items() for said in every])
async def test_a_damaged_call_stays_text_to_the_last_character(
    form: str, said: str, peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    peers[form].says = [said]
    whole = (await client.chat.completions.create(**asking(form))).choices[0]
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (said, None, "stop")
    stream = await client.chat.completions.create(**asking(form), stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == said
    assert not any(choice.delta.tool_calls for choice in choices) and choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("form", FORMS)
async def test_a_call_that_is_cut_off_is_no_whole_one_and_says_so(
    form: str, peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    said = WRITTEN[form](WEATHER)
    begun = said[: said.index("days") + 2]
    peers[form].says = [said]
    limit = len(peers[form].tokenizer.encode(begun, add_special=False))
    choice = (await client.chat.completions.create(**asking(form), max_tokens=limit)).choices[0]
    ((name, arguments),) = read_calls(choice.message)
    assert name == "weather" and choice.finish_reason == "length" and not choice.message.content
    assert WEATHER[1].startswith(arguments) and arguments.endswith("da")
    with pytest.raises(ValueError):
        json.loads(arguments)


def ids_for_transformers(peer: ScriptedDecode, messages: list[Any], tools: list[Any]) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(peer.bundle.tokenizer_json)
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=peer.bundle.chat_template, **NAMES)
    ids: list[int] = oracle.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return ids


@pytest.mark.parametrize("form", FORMS)
async def test_a_result_goes_back_as_transformers_would_write_it(
    form: str, peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    peer = peers[form]
    peer.says = [WRITTEN[form](WEATHER)]
    message = (await client.chat.completions.create(**asking(form))).choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 °C"}
    peer.says = ["It is cool."]
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    after = (await client.chat.completions.create(**asking(form, messages=history))).choices[0]
    assert (after.message.content, after.finish_reason) == ("It is cool.", "stop")
    function = {"name": "weather", "arguments": json.loads(WEATHER[1])}
    plain = {
        "role": "assistant",
        "tool_calls": [{"id": result["tool_call_id"], "type": "function", "function": function}],
    }
    assert list(peer.asked[-1].prompt_ids) == ids_for_transformers(peer, [*MESSAGES, plain, result], TOOLS)


async def test_one_call_at_a_time_several_choices_and_no_calls_at_all(
    peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    peer = peers["hermes"]
    both, text = WRITTEN["hermes"](WEATHER, NOW), "No need."
    peer.says = [both, text]
    first, second = (await client.chat.completions.create(**asking("hermes"), n=2, parallel_tool_calls=False)).choices
    assert (read_calls(first.message), first.finish_reason) == ([WEATHER], "tool_calls")
    assert (read_calls(second.message), second.message.content, second.finish_reason) == ([], text, "stop")
    kept: dict[int, list[str]] = {0: [], 1: []}
    async for chunk in await client.chat.completions.create(**asking("hermes"), n=2, stream=True):
        for choice in chunk.choices:
            kept[choice.index] += [c.function.name for c in choice.delta.tool_calls or [] if c.function and c.id]
    assert kept == {0: ["weather", "now"], 1: []}
    off = (await client.chat.completions.create(**asking("hermes"), tool_choice="none")).choices[0]
    assert (off.message.content, off.message.tool_calls, off.finish_reason) == (both, None, "stop")
    assert list(peer.asked[-1].prompt_ids) == ids_for_transformers(peer, MESSAGES, [])


async def test_a_stream_that_breaks_within_a_call_is_an_error_and_no_finish(
    peers: dict[str, ScriptedDecode], client: AsyncOpenAI
) -> None:
    peer = peers["hermes"]
    peer.says, peer.breaks = ['<tool_call>{"name": "weather", "arguments": {"city": '], Internal("it broke")
    choices = []
    try:
        with pytest.raises(openai.APIError, match="it broke"):
            async for chunk in await client.chat.completions.create(**asking("hermes"), stream=True):
                choices += chunk.choices
    finally:
        peer.breaks = None
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    assert "".join((part.function and part.function.arguments) or "" for part in parts) == '{"city": '
    assert not any(choice.finish_reason for choice in choices)


@pytest.mark.parametrize("form", FORMS)
async def test_both_of_our_clients_tell_calls_apart_from_text(
    form: str, peers: dict[str, ScriptedDecode], router: Router
) -> None:
    spoken = "" if form == "llama3" else "Moment."
    said = spoken + WRITTEN[form](WEATHER, NOW)
    peers[form].says = [said]
    options: Any = {"model": form, "messages": MESSAGES, "tools": TOOLS}
    async with AsyncClient(router.address) as it:
        answer = await it.complete(**options, tool_choice="auto")
        unread = await it.complete(**options)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [WEATHER, NOW]
    assert (answer.text, answer.finish.reason) == (spoken, "tool_calls")
    check_ids(form, [call.id for call in answer.tool_calls])
    assert unread.tool_calls == () and unread.finish.reason == "stop"  # as before there was a choice: text
    assert "weather" in unread.text

    def talk() -> Any:
        with Client(router.address) as sync:
            return sync.complete(**options, tool_choice="auto", parallel_tool_calls=False)

    assert [(call.name, call.arguments) for call in (await asyncio.to_thread(talk)).tool_calls] == [WEATHER]


async def test_calls_come_piece_by_piece_over_grpc_and_a_result_goes_back(
    peers: dict[str, ScriptedDecode], router: Router
) -> None:
    peer = peers["hermes"]
    peer.says = ["Well. " + WRITTEN["hermes"](WEATHER)]
    chat = gateway_pb2.ChatPrompt(tools_json=json.dumps(TOOLS), tool_mode="auto")
    chat.messages.add(role="user", content=MESSAGES[0]["content"])
    stub: Any = gateway_pb2_grpc.GatewayStub(router.channels.get(router.address))
    request = gateway_pb2.GenerateRequest(model="hermes", chat=chat)
    events = [event async for event in stub.Generate(request, timeout=10)]
    parts = [part for event in events for part in event.tool_calls]
    assert [(part.name, bool(part.id)) for part in parts[:2]] == [("weather", True), ("", False)]
    assert "".join(part.arguments for part in parts) == WEATHER[1] and {part.index for part in parts} == {0}
    assert b"".join(event.tokens.text for event in events).rstrip() == b"Well."
    assert events[-1].finish.reason == "tool_calls"
    counted = sum(len(event.tokens.ids) for event in events)
    assert counted == events[-1].finish.usage.output_tokens == len(peer.tokenizer.encode(peer.says[0]))

    async with AsyncClient(router.address) as it:
        first = await it.complete(model="hermes", messages=MESSAGES, tools=TOOLS, tool_choice="auto")
        calls = [call.as_message() for call in first.tool_calls]
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 °C"}
        history = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, result]
        peer.says = ["Cool."]
        after = await it.complete(model="hermes", messages=history, tools=TOOLS, tool_choice="auto")
    assert (after.text, after.tool_calls) == ("Cool.", ())
    assert list(peer.asked[-1].prompt_ids) == ids_for_transformers(peer, history, TOOLS)
