"""Options that the HTTP API has, through the gRPC gateway: raw messages and both of our clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from pdserve.client import Accepted, AsyncClient, Client, Finish, Tokens
from pdserve.errors import Internal, InvalidRequest
from pdserve.registry.records import DECODE
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.router.peers import BadDecode, serving
from tests.router.scripted import ScriptedDecode, scripted
from tests.router.support import MODEL, VOCAB, House, bundle
from tests.router.tools import TOOLS
from tests.tokenizer.shapes import QWEN_LIKE

module_loop = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the cat sat", "a dog, naïvely €5", "the log"]
IDS = Backend.from_str(bundle().tokenizer_json).encode(TEXTS[1]).ids
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
MESSAGES: Any = [{"role": "user", "content": "the dog"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours(made: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(made.router.address) as it:
        yield it


@module_loop
async def test_several_prompts_are_one_request_whose_choices_come_prompt_by_prompt(
    made: House, ours: AsyncClient
) -> None:
    drawn: Any = {"max_tokens": 8, "ignore_eos": True, "seed": 5, "n": 2}
    alone = [await ours.complete(prompt, **drawn) for prompt in TEXTS]
    prompts: list[str | list[int]] = [TEXTS[0], IDS, TEXTS[2]]
    together = await ours.complete(prompts=prompts, **drawn)
    wanted = [(choice.text, choice.ids) for answer in alone for choice in answer.choices]
    assert [(choice.text, choice.ids) for choice in together.choices] == wanted and len(wanted) == 6
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert together.usage.output_tokens == 48

    def talk() -> list[Any]:
        with Client(made.router.address) as sync:
            return list(sync.generate(prompts=prompts, **drawn))

    events = await asyncio.to_thread(talk)
    accepted = {event.prompt: event.prompt_tokens for event in events if isinstance(event, Accepted)}
    assert accepted == {n: answer.usage.prompt_tokens for n, answer in enumerate(alone)}
    assert sorted(event.choice for event in events if isinstance(event, Finish)) == list(range(6))


@module_loop
async def test_one_bad_prompt_of_several_refuses_all_before_any_work(made: House, ours: AsyncClient) -> None:
    seen = []
    with pytest.raises(InvalidRequest) as caught:
        async for event in ours.generate(prompts=["the cat", [VOCAB]]):
            seen.append(event)
    assert caught.value.reason == "TOKEN_OUT_OF_RANGE" and not seen
    await made.assert_nothing_held()


@module_loop
async def test_one_prompt_that_breaks_ends_them_all_with_an_error_and_the_usage(made: House, ours: AsyncClient) -> None:
    bad = BadDecode(made.decodes[0].contract, tokens=3, end=Internal("it broke"))
    stub: Any = gateway_pb2_grpc.GatewayStub(made.router.channels.get(made.router.address))
    several = [gateway_pb2.ListedPrompt(text=text) for text in TEXTS[:2]]
    request = gateway_pb2.GenerateRequest(several=gateway_pb2.PromptList(prompts=several))
    async with serving(bad) as address:
        await made.add_ghost("bad", DECODE, address)
        busy = made.make_look_busy("d0")
        events = []
        with pytest.raises(grpc.RpcError, match="it broke"):
            async for event in stub.Generate(request, timeout=10):
                events.append(event)
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    assert events[-1].error.reason == "INTERNAL" and not any(event.HasField("finish") for event in events)
    delivered = sum(len(event.tokens.ids) for event in events)
    assert events[-1].usage.output_tokens == delivered >= 3
    await made.assert_nothing_held()


@module_loop
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_gives_the_prompts_text_first_in_every_choice(ours: AsyncClient, n: int) -> None:
    forms: Any = ({"prompts": [TEXTS[1], IDS]}, {"token_ids": IDS})
    for prompt in forms:
        plain = await ours.complete(**prompt, **GREEDY, n=n)
        echoed = await ours.complete(**prompt, **GREEDY, n=n, echo=True)
        assert [choice.text for choice in echoed.choices] == [TEXTS[1] + choice.text for choice in plain.choices]
        assert [choice.ids for choice in echoed.choices] == [choice.ids for choice in plain.choices]
        assert echoed.usage.output_tokens == plain.usage.output_tokens
    events = [event async for event in ours.generate(TEXTS[0], **GREEDY, echo=True)]
    first = next(event for event in events if isinstance(event, Tokens))
    assert (first.text, first.ids, first.first_index) == (TEXTS[0], (), 0)


def chat(**changes: Any) -> gateway_pb2.ChatPrompt:
    said = [gateway_pb2.ChatMessage(role="user", content="the dog")]
    return gateway_pb2.ChatPrompt(messages=said, **({"tools_json": json.dumps(TOOLS)} | changes))


def several(count: int, **changes: Any) -> dict[str, Any]:
    return {"several": {"prompts": [{"text": "a"}] * count}, **changes}


Sampling = common_pb2.SamplingOptions
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a mode that is none": ({"chat": chat(tool_mode="sometimes")}, "tool_choice", "INVALID_FIELD"),
    "an empty mode": ({"chat": chat(tool_mode="")}, "tool_choice", "INVALID_FIELD"),
    "required without tools": ({"chat": chat(tool_mode="required", tools_json="")}, "tool_choice", "INVALID_FIELD"),
    "a function not offered": ({"chat": chat(tool_function="sing")}, "tool_choice", "INVALID_FIELD"),
    "tools of no known type": (
        {"chat": chat(tool_mode="auto", tools_json='[{"type": "web_search"}]')},
        "tools[0].type",
        "INVALID_FIELD",
    ),
    "an unknown field of a tool": (
        {"chat": chat(tool_mode="auto", tools_json='[{"type": "function", "function": {"name": "f", "x": 1}}]')},
        "tools[0].function.x",
        "UNKNOWN_FIELD",
    ),
    "tools twice": (
        {"chat": chat(tool_mode="auto", tools_json=json.dumps(TOOLS[:1] * 2))}, "tools", "INVALID_FIELD",
    ),
    "tools that are no JSON": ({"chat": chat(tool_mode="auto", tools_json="[{")}, "tools_json", "INVALID_JSON"),
    "tools with what is no text": ({"chat": chat(tools_json='[{"name": "\\ud800"}]')}, "tools_json", "INVALID_JSON"),
    "variables with what is no text": (
        {"chat": chat(tools_json="", variables_json='{"\\ud800": "\\ud800"}')}, "variables_json", "INVALID_JSON",
    ),
    "tools that are no list": ({"chat": chat(tools_json="{}")}, "tools_json", "INVALID_JSON"),
    "a template without tools": ({"chat": chat(tool_mode="auto")}, "tools", "NO_TOOLS"),
    "tools and a grammar": (
        {"chat": chat(tool_mode="auto"), "sampling": Sampling(regex="a")}, "regex", "INVALID_FIELD",
    ),
    "parallel calls without a choice": (
        {"chat": chat(parallel_tool_calls=False)}, "parallel_tool_calls", "INVALID_FIELD",
    ),
    "a header, and the last message goes on": (
        {"chat": chat(tools_json="", continue_final_message=True, add_generation_prompt=True)},
        "continue_final_message",
        "INVALID_FIELD",
    ),
    "an echo of a chat": ({"chat": chat(tools_json=""), "echo": True}, "echo", "INVALID_FIELD"),
    "an echo with log probabilities": (
        {"text": "a", "echo": True, "sampling": Sampling(logprobs=1)}, "echo", "PROMPT_LOGPROBS",
    ),
    "special tokens around a chat": (
        {"chat": chat(tools_json=""), "add_special_tokens": False}, "add_special_tokens", "INVALID_FIELD",
    ),
    "no prompt among several": (several(0), "prompt", "EMPTY_PROMPT"),
    "a prompt of no kind": ({"several": {"prompts": [{"text": "a"}, {}]}}, "prompt", "EMPTY_PROMPT"),
    "an empty one of several": ({"several": {"prompts": [{"text": "a"}, {"text": ""}]}}, "prompt[1]", "EMPTY_PROMPT"),
    "too many prompts": (several(129), "prompt", "TOO_MANY_PROMPTS"),
    "too many choices": (several(43, n=3), "n", "TOO_MANY_CHOICES"),
    "a record of several": (several(2, want_record=True), "want_record", "INVALID_FIELD"),
}  # fmt: skip


@module_loop
@pytest.mark.parametrize("case", BAD)
async def test_bad_values_are_refused_by_name(made: House, case: str) -> None:
    fields, field, reason = BAD[case]
    stub: Any = gateway_pb2_grpc.GatewayStub(made.router.channels.get(made.router.address))
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.Generate(gateway_pb2.GenerateRequest(**fields), timeout=10):
            raise AssertionError("no event may come")
    error = from_rpc_error(caught.value)
    assert (type(error), error.field, error.reason) == (InvalidRequest, field, reason), error
    assert error.remedy


@module_loop
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompts": ["a"], "token_ids": [1]}, "prompt"),
        ({"prompts": ["a", 5]}, "prompt"),
        ({"prompts": ["a"], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"name": "now"}}, "tool_choice"),
        ({"messages": MESSAGES, "echo": True}, "echo"),
        ({"prompts": ["a"], "n": 0}, "n"),
        ({"prompts": ["a"], "tool_chioce": "auto"}, "tool_chioce"),
    ],
    ids=str,
)
async def test_the_client_refuses_by_name_too(ours: AsyncClient, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ours.complete(**options)
    assert caught.value.field == field


async def test_what_reaches_the_worker_is_what_the_tokenizers_library_and_transformers_make_of_it() -> None:
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(bundle().tokenizer_json)
    begin = backend.token_to_id("<|end|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|>:0 $A:0", pair=None, special_tokens=[("<|end|>", begin)]
    )
    plain = dataclasses.replace(bundle(), tokenizer_json=backend.to_str(), chat_template=QWEN_LIKE)
    peer = ScriptedDecode(dataclasses.replace(plain, bos_id=begin, add_bos=True), says=["x"])
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=QWEN_LIKE)
    messages: Any = [{"role": "system", "content": "Be kind."}, *MESSAGES, {"role": "assistant", "content": "It "}]
    async with scripted({MODEL: peer}) as router, AsyncClient(router.address) as it:
        for asked, expected in (
            ({"prompt": TEXTS[0]}, oracle.encode(TEXTS[0])),
            ({"prompt": TEXTS[0], "add_special_tokens": True}, oracle.encode(TEXTS[0])),
            ({"prompt": TEXTS[0], "add_special_tokens": False}, oracle.encode(TEXTS[0], add_special_tokens=False)),
            ({"prompts": [TEXTS[0]], "add_special_tokens": False}, oracle.encode(TEXTS[0], add_special_tokens=False)),
            ({"messages": messages}, {"add_generation_prompt": True}),
            ({"messages": messages, "add_generation_prompt": False}, {"add_generation_prompt": False}),
            ({"messages": messages, "continue_final_message": True}, {"continue_final_message": True}),
            (
                {"messages": messages, "tools": TOOLS, "tool_choice": "auto"},
                {"add_generation_prompt": True, "tools": TOOLS},
            ),
            ({"messages": messages, "tools": TOOLS, "tool_choice": "none"}, {"add_generation_prompt": True}),
        ):
            answer = await it.complete(**asked)
            if isinstance(expected, dict):
                expected = oracle.apply_chat_template(messages, return_dict=False, **expected)
            assert list(peer.asked[-1].prompt_ids) == list(expected), asked
            assert answer.text == "x" and answer.usage.prompt_tokens == len(expected)
