"""Both clients against a live gateway whose answers each test scripts."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from pdserve.client import (
    Accepted,
    AsyncClient,
    Choice,
    Client,
    Completion,
    Event,
    Finish,
    HandoffRecord,
    Tokens,
    ToolCall,
    Usage,
)
from pdserve.errors import (
    Cancelled,
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    FieldDifference,
    Incompatible,
    InvalidRequest,
    PdserveError,
    Refused,
    Unavailable,
)
from pdserve.request import SamplingParams
from pdserve.rpc import convert
from pdserve.rpc.events import PositionLogprobs, TokenBatch, TokenLogprob
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import abort, to_detail
from pdserve.v1 import gateway_pb2 as pb
from tests.rpc.gateway import ScriptedGateway, serving

ACCEPTED = Accepted("server-id", "tiny", 3, 7)
USAGE = Usage(3, 4, 1)
FINISH = Finish("stop", USAGE, stop_string="!")
RECORD = HandoffRecord(request_id="server-id", frames_sent=4, conversions=(FieldDifference("PAGE_SIZE", "8", "16"),))
LOGPROBS = tuple(PositionLogprobs(TokenLogprob(n, -0.5, 0), (TokenLogprob(n, -0.5, 0),)) for n in (10, 11))
# "caf\u00e9 \U0001f600": the second batch ends inside the smiley, which a server should not do but a client survives.
BATCHES = (
    TokenBatch(0, (10, 11), b"caf", LOGPROBS),
    TokenBatch(2, (12,), "é ".encode() + "😀".encode()[:2]),
    TokenBatch(3, (13,), "😀".encode()[2:]),
)


def message(event: Any) -> pb.GenerateEvent:
    if isinstance(event, TokenBatch):
        return pb.GenerateEvent(tokens=convert.tokens_to_proto(event))
    if isinstance(event, Accepted):
        return pb.GenerateEvent(accepted=convert.accepted_to_proto(event))
    if isinstance(event, HandoffRecord):
        return pb.GenerateEvent(record=convert.record_to_proto(event))
    if isinstance(event, PdserveError):
        return pb.GenerateEvent(error=to_detail(event))
    return pb.GenerateEvent(finish=convert.finish_to_proto(event))


def answering(*events: Any, requests: list[Any] | None = None) -> ScriptedGateway:
    """Sends the events; an error is sent as an event and then as the status, as the gateway does."""

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if requests is not None:
            requests.append(request)
        for event in events:
            yield message(event)
            if isinstance(event, PdserveError):
                await abort(context, event)

    return ScriptedGateway(generate=generate)


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["async", "sync"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Calls a method of either client and returns its result; what `generate` yields comes as a list."""

    async def with_async(address: str, method: str, *args: Any, **options: Any) -> Any:
        async with AsyncClient(address) as client:
            if method == "generate":
                return [event async for event in client.generate(*args, **options)]
            return await getattr(client, method)(*args, **options)

    def with_sync(address: str, method: str, *args: Any, **options: Any) -> Any:
        with Client(address) as client:
            result = getattr(client, method)(*args, **options)
            return list(result) if method == "generate" else result

    async def in_thread(*args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(with_sync, *args, **options)

    return with_async if request.param == "async" else in_thread


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
            yield message(Accepted("id", "tiny", 3, 7, prompt))
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


async def test_every_argument_reaches_the_server(ask: Ask) -> None:
    requests: list[Any] = []
    async with serving(answering(FINISH, requests=requests)) as server:
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


DIFF = Incompatible(
    "no pair of workers fits",
    field="LAYERS",
    remedy="start workers of one model",
    differences=(FieldDifference("LAYERS", "2", "3"), FieldDifference("KV_DTYPE", "fp32", "bf16", "lossy")),
)


async def test_a_refusal_carries_the_servers_diff(ask: Ask) -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if request.text:
            raise DIFF
        yield message(FINISH)

    async with serving(ScriptedGateway(generate=refuse)) as server:
        with pytest.raises(Incompatible) as caught:
            await ask(server.address, "generate", "x")
    assert vars(caught.value) == vars(DIFF)


@pytest.mark.parametrize("error", [DIFF, Exhausted("full", retry_after_ms=50), Unavailable("decode-a died")])
async def test_an_error_event_in_the_stream_is_raised(ask: Ask, error: PdserveError) -> None:
    async with serving(answering(ACCEPTED, BATCHES[0], error)) as server:
        with pytest.raises(type(error)) as caught:
            await ask(server.address, "generate", "x")
    assert vars(caught.value) == vars(error)


async def test_an_answer_without_a_finish_is_an_error(ask: Ask) -> None:
    async with serving(answering(ACCEPTED, BATCHES[0])) as server:
        for method in ("generate", "complete"):
            with pytest.raises(Unavailable) as caught:
                await ask(server.address, method, "x")
            assert caught.value.reason == "STREAM_CUT"


@pytest.mark.parametrize("batches", [(BATCHES[1],), (BATCHES[0], BATCHES[0]), (BATCHES[0], BATCHES[2])])
async def test_lost_or_repeated_tokens_are_an_error(ask: Ask, batches: tuple[TokenBatch, ...]) -> None:
    async with serving(answering(ACCEPTED, *batches, FINISH)) as server:
        with pytest.raises(DataLoss):
            await ask(server.address, "generate", "x")


async def test_unknown_events_of_a_newer_server_are_passed_over(ask: Ask) -> None:
    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent.FromString(b"\xa2\x06\x00")  # field 100, empty
        yield message(FINISH)

    async with serving(ScriptedGateway(generate=generate)) as server:
        assert await ask(server.address, "generate", "x") == [FINISH]


async def test_a_deadline_is_typed(ask: Ask) -> None:
    async with serving(hanging(asyncio.Event(), asyncio.Event())) as server:
        with pytest.raises(DeadlineExceeded) as caught:
            await ask(server.address, "generate", "x", timeout_s=0.3)
    told = "timeout_s: no complete answer within 0.3 s (raise timeout_s, or lower max_tokens)"
    assert str(caught.value) == told


async def test_a_routers_own_limit_keeps_its_own_remedy(ask: Ask) -> None:
    own = DeadlineExceeded("stopped after 1 s", field="deadline", remedy="allow more time")
    async with serving(answering(ACCEPTED, own)) as server:
        with pytest.raises(DeadlineExceeded) as caught:
            await ask(server.address, "generate", "x", timeout_s=60)
    assert vars(caught.value) == vars(own)


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


async def test_an_unreachable_address_is_unavailable_with_a_remedy(ask: Ask, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    for method, args in (("generate", ("x",)), ("complete", ("x",)), ("models", ()), ("status", ())):
        began = time.monotonic()
        with pytest.raises(Unavailable, match=address) as caught:
            await ask(address, method, *args)
        assert time.monotonic() - began < 5
        assert str(caught.value) == f"{address}: connection refused (check that a server listens at {address})"


async def test_a_peer_that_accepts_and_stays_silent_is_unavailable_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address, RpcSettings(connect_timeout_s=0.3)) as client:
            began = time.monotonic()
            with pytest.raises(Unavailable, match=address):
                await client.complete("x")
            assert time.monotonic() - began < 10


def test_bad_addresses_are_refused() -> None:
    for make in (AsyncClient, Client):
        with pytest.raises(ConfigError, match="host:port"):
            make("localhost")
        with pytest.raises(ConfigError, match="allow_plaintext"):
            make("10.0.0.1:1")


def hanging(started: asyncio.Event, cancelled: asyncio.Event) -> ScriptedGateway:
    """Sends one batch, then waits until it is cancelled."""

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        try:
            yield message(BATCHES[0])
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    return ScriptedGateway(generate=generate)


async def test_breaking_out_of_the_async_iterator_cancels_the_call() -> None:
    cancelled = asyncio.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server, AsyncClient(server.address) as client:
        async for _ in client.generate("x"):
            break
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_aclosing_cancels_the_call() -> None:
    cancelled = asyncio.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server, AsyncClient(server.address) as client:
        async with aclosing(client.generate("x")) as events:
            await anext(events)
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_cancelling_the_task_cancels_the_call() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server, AsyncClient(server.address) as client:
        task = asyncio.create_task(client.complete("x"))
        await asyncio.wait_for(started.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_closing_the_async_client_ends_its_calls_with_a_typed_error() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server:
        client = AsyncClient(server.address)
        task = asyncio.create_task(client.complete("x"))
        await asyncio.wait_for(started.wait(), 5)
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(task, 5)
        await asyncio.wait_for(cancelled.wait(), 5)
        with pytest.raises(Refused, match="closed"):
            await client.models()
        await client.close()


async def test_breaking_out_of_the_sync_iterator_cancels_the_call() -> None:
    cancelled = asyncio.Event()

    def use(address: str) -> list[Event]:
        with Client(address) as client:
            for event in client.generate("x"):
                assert isinstance(event, Tokens)
                break
            gc.collect()
            left.set()
            assert may_close.wait(10)
            return []

    left, may_close = threading.Event(), threading.Event()
    async with serving(hanging(asyncio.Event(), cancelled)) as server:
        using = asyncio.create_task(asyncio.to_thread(use, server.address))
        await asyncio.wait_for(cancelled.wait(), 5)  # while the client is still open
        may_close.set()
        await using
        assert left.is_set()


async def test_closing_the_sync_client_ends_its_calls_with_a_typed_error() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    async with serving(hanging(started, cancelled)) as server:
        client = Client(server.address)
        call = asyncio.create_task(asyncio.to_thread(client.complete, "x"))
        await asyncio.wait_for(started.wait(), 5)
        await asyncio.to_thread(client.close)
        with pytest.raises(Cancelled):
            await asyncio.wait_for(call, 5)
        await asyncio.wait_for(cancelled.wait(), 5)
        with pytest.raises(Refused, match="closed"):
            client.models()


async def test_threads_share_a_sync_client() -> None:
    async with serving(answering(ACCEPTED, *BATCHES, FINISH)) as server:
        with Client(server.address) as client:
            answers = await asyncio.gather(*(asyncio.to_thread(client.complete, "x") for _ in range(8)))
    assert [answer.text for answer in answers] == ["café 😀"] * 8


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with serving(answering(ACCEPTED, *BATCHES, FINISH)) as server, AsyncClient(server.address) as client:
        await client.complete("x")
        async with aclosing(client.generate("x")) as events:
            await anext(events)
    left = asyncio.all_tasks() - before
    if left:  # gRPC's own, of the server that was just stopped
        await asyncio.wait(left, timeout=5)
    assert asyncio.all_tasks() - before == set()
