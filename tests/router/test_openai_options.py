"""Options of the OpenAI HTTP API as the router understands them, and a failure as OpenAI's own client shows it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from pdserve.errors import Internal
from pdserve.registry.records import CHOICES, DECODE
from pdserve.request import REGEX, Grammar, SamplingParams
from pdserve.tokenizer import Tokenizer
from router.openai_schema import parse_chat, parse_completion
from tests.router.peers import BadDecode, serving
from tests.router.support import MODEL, House, bundle

module_loop = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "the cat sat"}]
EVERY_OPTION: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "repetition_penalty": 1.5,
    "seed": 2**64 - 1,
    "stop": ["a", "é"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "min_tokens": 2,
    "logit_bias": {"3": -1.5, "9": 2},
    "skip_special_tokens": False,
    "response_format": {"type": "regex", "regex": "a+"},
}
UNDERSTOOD = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    repetition_penalty=1.5,
    seed=2**64 - 1,
    stop=("a", "é"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    max_tokens=11,
    min_tokens=2,
    logit_bias={3: -1.5, 9: 2.0},
    logprobs=3,
    grammar=Grammar(REGEX, "a+"),
    skip_special_tokens=False,
)
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
TEXT = {"prompt": "the cat sat", "logprobs": 3}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("chat", {**CHAT, "max_tokens": 11}),
        ("chat", {**CHAT, "max_completion_tokens": 11}),
        ("completion", {**TEXT, "max_tokens": 11}),
    ],
    ids=["chat", "chat, max_completion_tokens", "completion"],
)
def test_every_option_of_sampling_reaches_it_from_a_body(kind: str, more: dict[str, Any]) -> None:
    at_default = [
        f.name for f in fields(UNDERSTOOD) if getattr(UNDERSTOOD, f.name) == getattr(SamplingParams(), f.name)
    ]
    assert at_default == []  # so that none of them can get lost unseen
    data = json.dumps(EVERY_OPTION | more).encode()
    ask = parse_chat(data).ask() if kind == "chat" else parse_completion(data).asks()[0]
    assert ask.sampling == UNDERSTOOD
    assert ask.unset == frozenset()  # the model's own defaults have no say


def test_other_ways_to_write_an_option_mean_the_same() -> None:
    for written, meant in (
        ({"stop": "a"}, SamplingParams(stop=("a",))),
        ({"top_k": -1}, SamplingParams(top_k=0)),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": False}, SamplingParams()),
        ({"temperature": 0}, SamplingParams(temperature=0.0)),
    ):
        data = json.dumps({"model": MODEL, "messages": MESSAGES} | written).encode()
        assert parse_chat(data).ask().sampling == meant


@module_loop
@pytest.mark.parametrize(
    "option",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": {"type": "object", "additionalProperties": {"type": "string"}}}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
    ],
    ids=json.dumps,
)
async def test_any_json_object_is_one(client: AsyncOpenAI, option: dict[str, Any]) -> None:
    """The model is made to want quotes above all, then the end of the object: it may write one entry of two empty
    strings, and nothing shorter.
    """
    (quote,), (end,) = (Tokenizer(bundle()).encode(text) for text in '"}')
    wishes: Any = {"model": MODEL, "temperature": 0, "max_tokens": 64, "logit_bias": {str(quote): 100, str(end): 50}}
    free = await client.completions.create(**wishes, prompt="It is")
    assert free.choices[0].text == '"' * 64
    text = await client.completions.create(**wishes, prompt="It is", extra_body=option)
    chat = await client.chat.completions.create(**wishes, messages=MESSAGES, extra_body=option)
    assert json.loads(text.choices[0].text) == json.loads(chat.choices[0].message.content or "") == {"": ""}
    assert (text.choices[0].finish_reason, chat.choices[0].finish_reason) == ("stop", "stop")


async def seen_until_it_breaks(stream: Any) -> tuple[list[Any], openai.APIError]:
    """The choices of all chunks, and what the client raises after them."""
    choices = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            choices += chunk.choices
    return choices, caught.value


@module_loop
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_openais_client_raises_where_a_stream_breaks(made: House, client: AsyncOpenAI, kind: str, n: int) -> None:
    bad = BadDecode(made.decodes[0].contract, tokens=3, end=Internal("it broke"))
    options: Any = {"model": MODEL, "n": n, "stream": True, "max_tokens": 100}
    async with serving(bad) as address:
        await made.add_ghost("bad", DECODE, address, capabilities=frozenset({CHOICES}))
        busy = made.make_look_busy("d0")
        if kind == "chat":
            stream: Any = await client.chat.completions.create(**options, messages=MESSAGES)
        else:
            stream = await client.completions.create(**options, prompt="the cat sat")
        choices, error = await seen_until_it_breaks(stream)
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    assert bad.calls == 1
    texts = [c.delta.content or "" if kind == "chat" else c.text for c in choices if c.index == 0]
    assert "".join(texts) == "xxx"
    assert [c.finish_reason for c in choices if c.finish_reason] == []
    assert error.code == "internal" and "it broke" in error.message
    await made.assert_nothing_held()
