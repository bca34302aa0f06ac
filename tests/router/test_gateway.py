"""The gRPC gateway, through the project's own client, in front of real workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.client import Accepted, AsyncClient, Client, Finish, HandoffRecord, Tokens
from pdserve.engine.plan import EngineConfig
from pdserve.errors import Incompatible, Internal, InvalidRequest, NotFound, PdserveError, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, PREFILL
from pdserve.rpc.status import from_rpc_error
from pdserve.tokenizer import Tokenizer
from pdserve.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from router.gate import Gate
from router.pool import Pool
from router.service import pairs_to_proto
from tests.engine.tiny import prompt
from tests.router.peers import BadDecode, serving
from tests.router.support import CONTEXT, MODEL, VOCAB, House, bundle, contract, house, member, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = prompt(30, seed=1, vocab=VOCAB)
CHAT = [{"role": "user", "content": "the dog"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(made: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(made.router.address) as it:
        yield it


async def test_text_chat_and_ids_are_the_same_request(made: House, client: AsyncClient) -> None:
    tokenizer = Tokenizer(bundle())
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    text = tokenizer.render_chat(CHAT)
    answers = [
        await client.complete(text, **options),
        await client.complete(messages=CHAT, **options),
        await client.complete(token_ids=tokenizer.encode(text), **options),
    ]
    assert len({answer.ids for answer in answers}) == 1 and len(answers[0].ids) == 12
    assert {answer.text for answer in answers} == {tokenizer.decode(answers[0].ids)}


async def test_the_synchronous_client(made: House, client: AsyncClient) -> None:
    options: dict[str, Any] = {"messages": CHAT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    def talk() -> str:
        with Client(made.router.address) as plain:
            return plain.complete(**options).text

    assert await asyncio.to_thread(talk) == (await client.complete(**options)).text


async def test_events_come_in_order_and_the_seed_in_force_is_told(client: AsyncClient) -> None:
    options: dict[str, Any] = {"token_ids": IDS, "max_tokens": 8, "ignore_eos": True, "want_record": True}
    events = [event async for event in client.generate(**options)]
    accepted, finish = events[0], events[-1]
    assert isinstance(accepted, Accepted) and accepted.model == MODEL and accepted.prompt_tokens == len(IDS)
    (record,) = [event for event in events if isinstance(event, HandoffRecord)]
    assert record.request_id == accepted.request_id
    assert isinstance(finish, Finish) and finish.usage.output_tokens == 8
    ids = tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)
    assert (await client.complete(**options, seed=accepted.seed)).ids == ids
    assert (await client.complete(**options, seed=accepted.seed ^ 1)).ids != ids


async def test_models_and_status(client: AsyncClient) -> None:
    (listed,) = await client.models()
    assert (listed.name, listed.context_limit, listed.vocab_size) == (MODEL, CONTEXT, VOCAB)
    assert listed.has_tokenizer and listed.has_chat_template
    status = await client.status()
    assert sorted((w.worker_id, w.role, w.state) for w in status.workers) == [
        ("d0", "decode", "ready"),
        ("p0", "prefill", "ready"),
    ]
    (pair,) = status.pairs
    assert (pair.prefill_worker, pair.decode_worker, pair.fits) == ("p0", "d0", True)
    assert (status.registry, status.registry_warning, status.active_requests) == ("memory", "", 0)


BAD: list[tuple[dict[str, Any], type[PdserveError], str, str]] = [
    ({"token_ids": []}, InvalidRequest, "EMPTY_PROMPT", "prompt"),
    ({"text": ""}, InvalidRequest, "EMPTY_PROMPT", "prompt"),
    ({"chat": []}, InvalidRequest, "EMPTY_PROMPT", "messages"),
    ({}, InvalidRequest, "EMPTY_PROMPT", "prompt"),
    ({"token_ids": [1, -1]}, InvalidRequest, "TOKEN_OUT_OF_RANGE", "prompt"),
    ({"token_ids": [1, VOCAB]}, InvalidRequest, "TOKEN_OUT_OF_RANGE", "prompt"),
    ({"token_ids": [1] * CONTEXT}, InvalidRequest, "PROMPT_TOO_LONG", "prompt"),
    ({"token_ids": [1], "model": "other"}, NotFound, "UNKNOWN_MODEL", "model"),
    ({"token_ids": [1], "adapter": "lora"}, NotFound, "UNKNOWN_ADAPTER", "adapter"),
    ({"token_ids": [1], "temperature": float("nan")}, InvalidRequest, "INVALID_TEMPERATURE", "temperature"),
    ({"token_ids": [1], "temperature": -0.5}, InvalidRequest, "INVALID_TEMPERATURE", "temperature"),
    ({"token_ids": [1], "top_p": float("inf")}, InvalidRequest, "INVALID_TOP_P", "top_p"),
    ({"token_ids": [1], "max_tokens": 0}, InvalidRequest, "INVALID_MAX_TOKENS", "max_tokens"),
    ({"token_ids": [1], "min_tokens": 9999}, InvalidRequest, "INVALID_MIN_TOKENS", "min_tokens"),
    ({"token_ids": [1], "stop_token_ids": [-3]}, InvalidRequest, "INVALID_STOP_TOKEN_IDS", "stop_token_ids"),
    ({"token_ids": [1], "logit_bias": {VOCAB: 1.0}}, InvalidRequest, "INVALID_LOGIT_BIAS", "logit_bias"),
]


def message_of(options: dict[str, Any]) -> gateway_pb2.GenerateRequest:
    """The raw message: the client would refuse some of these before sending them."""
    options = dict(options)
    message = gateway_pb2.GenerateRequest(model=options.pop("model", ""), adapter=options.pop("adapter", ""))
    if "token_ids" in options:
        message.tokens.ids.extend(options.pop("token_ids"))
        message.tokens.SetInParent()
    if "text" in options:
        message.text = options.pop("text")
    if "chat" in options:
        message.chat.SetInParent()
        for role, content in options.pop("chat"):
            message.chat.messages.add(role=role, content=content)
    message.sampling.CopyFrom(common_pb2.SamplingOptions(**options))
    return message


@pytest.mark.parametrize(("options", "kind", "reason", "field"), BAD)
async def test_bad_input_is_a_status_with_detail(
    made: House, client: AsyncClient, options: dict[str, Any], kind: type[PdserveError], reason: str, field: str
) -> None:
    stub: Any = gateway_pb2_grpc.GatewayStub(made.router.channels.get(made.router.address))
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.Generate(message_of(options), timeout=10):
            raise AssertionError("no event may come")
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason, error.field) == (kind, reason, field)
    if kind is NotFound and field == "model":
        assert MODEL in error.remedy
    if reason == "PROMPT_TOO_LONG":
        assert str(CONTEXT) in error.message and str(CONTEXT - 1) in error.message
    good = await client.complete(token_ids=IDS, max_tokens=2, ignore_eos=True)
    assert len(good.ids) == 2  # others are unaffected


async def test_a_failure_after_the_first_token_is_an_event_and_the_same_status(made: House) -> None:
    stub: Any = gateway_pb2_grpc.GatewayStub(made.router.channels.get(made.router.address))
    async with serving(BadDecode(made.decodes[0].contract, tokens=2, end=Internal("it broke"))) as address:
        await made.add_ghost("bad", DECODE, address)
        busy = made.make_look_busy("d0")
        kinds = []
        with pytest.raises(grpc.RpcError) as caught:
            async for event in stub.Generate(message_of({"token_ids": IDS}), timeout=10):
                kinds.append(event.WhichOneof("event"))
        made.router.pool.end(busy)
        await made.remove_ghost("bad")
    assert kinds[0] == "accepted" and kinds[-1] == "error" and set(kinds[1:-1]) == {"tokens"}
    assert event.error.reason == "INTERNAL"
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert from_rpc_error(caught.value).message == "it broke"


async def test_leaving_the_stream_stops_the_work(made: House, client: AsyncClient) -> None:
    async with aclosing(client.generate(token_ids=IDS, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                break
    async with asyncio.timeout(5):
        await made.router.orchestrator.idle()
    await made.assert_nothing_held()


async def test_a_prompt_longer_than_the_page_pool_is_refused_with_counts() -> None:
    async with house(prefills=1, decodes=0) as small:
        await small.add_decode("d0", engine=EngineConfig(dtype="fp32", pages=8, page_size=4))
        async with AsyncClient(small.router.address) as client:
            with pytest.raises(InvalidRequest, match=r"40 tokens.*32") as caught:
                await client.complete(token_ids=[1] * 40)
            assert caught.value.reason == "PROMPT_TOO_LONG"
            answer = await client.complete(token_ids=[1] * 20, ignore_eos=True)
            assert len(answer.ids) == 12  # what the pool leaves


async def test_the_matrix_names_what_differs() -> None:
    async with house(decodes=1) as made:
        await made.add_decode("stranger", of=model(seed=1))
        async with AsyncClient(made.router.address) as client:
            pairs = {pair.decode_worker: pair for pair in (await client.status()).pairs}
            assert pairs["d0"].fits and not pairs["stranger"].fits
            assert [d.code for d in pairs["stranger"].differences if d.kind == "must_equal"] == ["MODEL_DIGEST"]
            await made.decodes[0].stop()
            await made.router.pool.refresh()
            with pytest.raises(Incompatible) as caught:
                await client.complete(token_ids=IDS)
            assert [d.code for d in caught.value.differences] == ["MODEL_DIGEST"]
        made.decodes.pop(0)


async def test_the_matrix_of_a_large_pool_has_a_pair_for_each_kind() -> None:
    members = [member(f"p{n}", PREFILL) for n in range(40)] + [member(f"d{n}", DECODE) for n in range(39)]
    members.append(member("stranger", DECODE, contract(model_digest=b"x" * 32)))
    pool = Pool(MemoryRegistry(), Gate(), 1.0)
    pairs = pairs_to_proto(pool, tuple(members))
    assert [(pair.prefill_worker, pair.decode_worker, pair.fits) for pair in pairs] == [
        ("p0", "d0", True),
        ("p0", "stranger", False),
    ]
    assert len(pairs_to_proto(pool, (*members[:10], *members[40:]))) == 400


async def test_an_empty_router_says_that_no_worker_has_come() -> None:
    async with house(prefills=0, decodes=0) as empty, AsyncClient(empty.router.address) as client:
        assert await client.models() == ()
        with pytest.raises(Unavailable) as caught:
            await client.complete(token_ids=IDS)
        assert caught.value.reason == "NO_WORKER"


async def test_a_label_and_the_number_of_messages_are_bounded(made: House) -> None:
    async with grpc.aio.insecure_channel(made.router.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        messages = [gateway_pb2.ChatMessage()] * 4097
        for request, field in (
            (gateway_pb2.GenerateRequest(text="hi", request_id="n" * 257), "request_id"),
            (gateway_pb2.GenerateRequest(chat=gateway_pb2.ChatPrompt(messages=messages)), "messages"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Generate(request).read()
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequest) and error.field == field
