"""A client that is newer than its router: no option is ignored without a word."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.client import Finish, Tokens
from pdserve.errors import Refused
from pdserve.registry.records import CHOICES, GRAMMAR, SPECIAL_TOKENS
from pdserve.request import Grammar, SamplingParams
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.later_fields import _FIRST, later_fields
from pdserve.v1 import common_pb2, gateway_pb2
from router.request import needs
from tests.client.answers import ACCEPTED, BATCHES, FINISH, Ask, answering
from tests.rpc.gateway import serving

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}]
OF_THE_FIRST_VERSION: dict[str, Any] = {
    "model": "tiny",
    "adapter": "red",
    "request_id": "mine",
    "want_record": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: 2.0},
    "seed": 1,
    "stop": "x",
    "stop_token_ids": [1],
    "max_tokens": 3,
    "min_tokens": 1,
    "ignore_eos": True,
    "logprobs": 1,
    "skip_special_tokens": True,
    "n": 1,
    "add_special_tokens": True,
}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("json_schema", {"prompt": "x", "json_schema": {"type": "object"}}),
        ("regex", {"prompt": "x", "regex": "a+"}),
        ("lark", {"prompt": "x", "lark": "start: /a/"}),
        ("n", {"prompt": "x", "n": 2}),
        ("echo", {"prompt": "x", "echo": True}),
        ("add_special_tokens", {"prompt": "x", "add_special_tokens": False}),
        ("skip_special_tokens", {"prompt": "x", "skip_special_tokens": False}),
        ("prompts", {"prompts": ["x"]}),
        ("tools", {"messages": HELLO, "tools": [TOOL]}),
        ("tool_choice", {"messages": HELLO, "tool_choice": "none"}),
        ("tool_choice", {"messages": HELLO, "tool_choice": TOOL}),
        ("parallel_tool_calls", {"messages": HELLO, "parallel_tool_calls": False}),
        ("add_generation_prompt", {"messages": HELLO, "add_generation_prompt": False}),
        ("continue_final_message", {"messages": HELLO, "continue_final_message": True}),
        ("chat_template_kwargs", {"messages": HELLO, "chat_template_kwargs": {"a": 1}}),
        ("messages", {"messages": HELLO + CALLED}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_option_that_an_older_router_would_ignore_is_refused_by_name(
    ask: Ask, field: str, options: dict[str, Any]
) -> None:
    """Its schema has no such field, and so its answer says nothing of it."""
    async with serving(answering(ACCEPTED, *BATCHES, FINISH)) as older:
        with pytest.raises(Refused) as caught:
            await ask(older.address, "complete", **options)
    assert (caught.value.reason, caught.value.field) == ("NOT_CAPABLE", field)
    assert "update the router" in caught.value.remedy


async def test_a_router_that_never_says_what_it_has_read_is_not_believed(ask: Ask) -> None:
    async with serving(answering(*BATCHES, FINISH)) as odd:
        with pytest.raises(Refused):
            await ask(odd.address, "complete", "x", n=2)


async def test_what_the_first_version_had_is_asked_of_every_router(ask: Ask) -> None:
    requests: list[Any] = []
    async with serving(answering(ACCEPTED, *BATCHES, FINISH, requests=requests)) as older:
        events = await ask(older.address, "generate", "x", **OF_THE_FIRST_VERSION)
        await ask(older.address, "complete", messages=HELLO)
        await ask(older.address, "complete", token_ids=[1, 2])
    assert any(isinstance(event, Tokens) for event in events) and isinstance(events[-1], Finish)
    assert [later_fields(request) for request in requests] == [frozenset()] * 3


def test_what_is_said_of_the_first_version_is_in_the_schema() -> None:
    for module in (gateway_pb2, common_pb2):
        for name, message in module.DESCRIPTOR.message_types_by_name.items():
            assert _FIRST.get(name, set()) <= {field.name for field in message.fields}, name


def test_every_later_field_of_sampling_needs_a_worker_that_says_it_follows_it() -> None:
    """Workers are older than their router in the same way: it asks their records."""
    changed = {
        "json_schema": SamplingParams(grammar=Grammar("json_schema", "{}")),
        "regex": SamplingParams(grammar=Grammar("regex", "a")),
        "lark": SamplingParams(grammar=Grammar("lark", "start: /a/")),
        "skip_special_tokens": SamplingParams(skip_special_tokens=False),
    }
    fields = {field.name for field in common_pb2.SamplingOptions.DESCRIPTOR.fields}
    assert changed.keys() == fields - _FIRST["SamplingOptions"], "a new one needs a capability, and a line here"
    for name, params in changed.items():
        assert later_fields(sampling_to_proto(params)) == {name}
        assert needs(params, 1) and needs(params, 1) <= {CHOICES, GRAMMAR, SPECIAL_TOKENS}
