"""What both clients make of a live gateway's answers, which each test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pdserve.client import Accepted, Choice, Completion, Event, Finish, Tokens, ToolCall, Usage
from pdserve.rpc import convert
from pdserve.rpc.events import TokenBatch
from pdserve.v1 import gateway_pb2 as pb
from tests.client.answers import ACCEPTED, BATCHES, FINISH, LOGPROBS, RECORD, USAGE, Ask, answering, message
from tests.rpc.gateway import ScriptedGateway, serving

LISTED = ("several", "several.prompts.text")


async def test_events_arrive_in_order_with_whole_characters(ask: Ask) -> None:
    async with serving(answering(ACCEPTED, *BATCHES, RECORD, FINISH)) as server:
        events: list[Event] = await ask(server.address, "generate", "hello", want_record=True)
    assert events == [
        ACCEPTED,
        Tokens(0, (10, 11), "caf", LOGPROBS),
        Tokens(2, (12,), "é "),
        Tokens(3, (13,), "😀"),
        RECORD,
        FINISH,
    ]


async def test_complete_puts_the_answer_together(ask: Ask) -> None:
    async with serving(answering(ACCEPTED, *BATCHES, RECORD, FINISH)) as server:
        answer = await ask(server.address, "complete", "hello")
    only = Choice("café 😀", (10, 11, 12, 13), FINISH, LOGPROBS)
    assert answer == Completion(only.text, only.ids, FINISH, USAGE, ACCEPTED, RECORD, LOGPROBS, (only,))


async def test_calls_are_put_together_from_their_parts_and_several_prompts_counted_each(ask: Ask) -> None:
    parts = [pb.ToolCallPart(index=0, id="c1", name="f", arguments='{"a'), pb.ToolCallPart(index=0, arguments='": 1}')]
    parts += [pb.ToolCallPart(index=1, id="c2", name="g", arguments="{}")]

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        for prompt in range(2):
            yield message(Accepted("id", "tiny", 3, 7, prompt, LISTED))
        for n, part in enumerate(parts):
            tokens = convert.tokens_to_proto(TokenBatch(n, (n,), b"", choice=1))
            yield pb.GenerateEvent(tokens=tokens, tool_calls=[part])
        for choice, reason in ((1, "tool_calls"), (0, "stop")):
            yield message(Finish(reason, USAGE, choice=choice))

    async with serving(ScriptedGateway(generate=generate)) as server:
        answer = await ask(server.address, "complete", prompts=["a", [1, 2]])
    assert answer.choices[1].tool_calls == (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))
    assert answer.tool_calls == () and answer.choices[1].finish.reason == "tool_calls"
    assert answer.usage == Usage(2 * USAGE.prompt_tokens, 2 * USAGE.output_tokens, 2 * USAGE.cached_prompt_tokens)


async def test_bytes_that_never_become_a_character_are_shown_as_one_mark(ask: Ask) -> None:
    async with serving(answering(ACCEPTED, TokenBatch(0, (1,), b"a\xf0\x9f"), FINISH)) as server:
        events = await ask(server.address, "generate", "x")
    assert events[1:] == [Tokens(0, (1,), "a"), Tokens(1, (), "\ufffd"), FINISH]


async def test_unknown_events_of_a_newer_server_are_passed_over(ask: Ask) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent.FromString(b"\xa2\x06\x00")  # field 100, empty
        yield message(FINISH)

    async with serving(ScriptedGateway(generate=generate)) as server:
        assert await ask(server.address, "generate", "x") == [FINISH]
