"""What callers give the clients: it reaches the server, or is refused by name before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.client import AsyncClient, Client
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.request import SamplingParams
from pdserve.rpc import convert
from tests.client.answers import FINISH, Ask, answering, reading
from tests.rpc.gateway import serving


async def test_every_argument_reaches_the_server(ask: Ask) -> None:
    requests: list[Any] = []
    async with serving(reading(requests)) as server:
        await ask(
            server.address,
            "generate",
            "hello",
            model="m",
            adapter="a",
            request_id="mine",
            want_record=True,
            temperature=0.25,
            stop="end",
            stop_token_ids=[4],
            logit_bias={3: -1.0},
            seed=0,
            max_tokens=5,
        )
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]
        await ask(
            server.address,
            "generate",
            messages=said,
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="required",
            parallel_tool_calls=False,
            add_generation_prompt=False,
            chat_template_kwargs={"enable_thinking": False},
        )
        await ask(server.address, "generate", token_ids=[1, 2], sampling=SamplingParams(top_k=3))
        named = {"type": "function", "function": {"name": "f"}}
        await ask(server.address, "generate", messages=said, tool_choice=named, continue_final_message=True)
        await ask(server.address, "generate", "a", echo=True, add_special_tokens=False)
    text, chat, tokens, one, echoed = requests
    assert (chat.chat.tool_mode, chat.chat.parallel_tool_calls, chat.chat.add_generation_prompt) == (
        "required",
        False,
        False,
    )
    assert chat.chat.HasField("parallel_tool_calls") and not one.chat.HasField("parallel_tool_calls")
    assert json.loads(chat.chat.tools_json)[0]["function"]["name"] == "f"
    assert json.loads(chat.chat.variables_json) == {"enable_thinking": False}
    assert chat.chat.messages[1].reasoning_content == "Hm."
    assert one.chat.WhichOneof("tool_choice") == "tool_function" and one.chat.tool_function == "f"
    assert one.chat.continue_final_message and not one.chat.HasField("add_generation_prompt")
    assert echoed.echo and echoed.HasField("add_special_tokens") and not echoed.add_special_tokens
    assert not text.echo and not text.HasField("add_special_tokens")
    assert (text.text, text.model, text.adapter, text.request_id, text.want_record) == ("hello", "m", "a", "mine", True)
    assert convert.sampling_from_proto(text.sampling) == SamplingParams(
        temperature=0.25, stop=("end",), stop_token_ids=(4,), logit_bias={3: -1.0}, seed=0, max_tokens=5
    )
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi"), ("assistant", "")]
    assert list(tokens.tokens.ids) == [1, 2]
    assert convert.sampling_from_proto(tokens.sampling) == SamplingParams(top_k=3)


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("prompt", None, {}),
        ("prompt", "a", {"token_ids": [1]}),
        ("prompt", None, {"messages": [{"role": "user"}]}),
        ("prompt", None, {"messages": ["hello"]}),
        ("prompt", None, {"token_ids": [2**31]}),
        ("prompt", None, {"token_ids": ["a"]}),
        ("prompt", "\ud800", {}),
        ("tempreature", "a", {"tempreature": 1.0}),
        ("temperature", "a", {"temperature": "hot"}),
        ("seed", "a", {"seed": -1}),
        ("sampling", "a", {"sampling": SamplingParams(), "top_k": 3}),
        ("timeout_s", "a", {"timeout_s": 0}),
    ],
)
async def test_bad_arguments_are_refused_by_name_before_anything_is_sent(
    ask: Ask, field: str, prompt: str | None, options: dict[str, Any]
) -> None:
    requests: list[Any] = []
    async with serving(answering(FINISH, requests=requests)) as server:
        with pytest.raises(InvalidRequest) as caught:
            await ask(server.address, "generate", prompt, **options)
    assert caught.value.field == field
    assert caught.value.remedy
    assert requests == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temprature": 1.0}, "temprature: there is no such option (did you mean temperature?)"),
        ({"timeout_s": -3}, "timeout_s: -3 is not allowed (use seconds above 0)"),
    ],
)
async def test_a_refusal_names_its_argument_once(ask: Ask, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ask("127.0.0.1:1", "generate", "x", **options)
    assert str(caught.value) == told


def test_bad_addresses_are_refused() -> None:
    for make in (AsyncClient, Client):
        with pytest.raises(ConfigError, match="host:port"):
            make("localhost")
        with pytest.raises(ConfigError, match="allow_plaintext"):
            make("10.0.0.1:1")
