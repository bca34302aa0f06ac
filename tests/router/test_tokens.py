"""Tokenizer bundles: fetched from workers, verified, shared and bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cache_transfer.contract import Endpoint
from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.registry.records import PREFILL, STARTING
from pdserve.rpc.server import Server
from pdserve.tokenizer import Bundle, Tokenizer
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from router.channels import WorkerChannels
from router.gate import Member
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.room import Room
from router.tokens import MAX_MESSAGES, BundleCache, encode
from tests.router.support import bundle, member

GOOD = bundle().to_bytes()
DIGEST = bundle().digest()
ROOM = Room(prompt=255, total=256)


@dataclass
class Holder(worker_pb2_grpc.WorkerServicer):
    """Delivers `pieces`, whatever was asked for."""

    pieces: tuple[bytes, ...]
    total: int = 0
    calls: int = 0
    stuck: bool = False  # after its last piece

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[worker_pb2.BundlePiece]:
        self.calls += 1
        if not self.pieces:
            raise NotFound("not here")
        for piece in self.pieces:
            yield worker_pb2.BundlePiece(data=piece, total_bytes=self.total or sum(map(len, self.pieces)))
        if self.stuck:
            await asyncio.Event().wait()


@asynccontextmanager
async def holding(*workers: Holder, limit: int = 8) -> AsyncIterator[tuple[BundleCache, list[Member]]]:
    servers = [Server() for _ in workers]
    channels = WorkerChannels()
    cache = BundleCache(channels, limit, timeout_s=5.0)
    try:
        members = []
        for number, (server, worker) in enumerate(zip(servers, workers, strict=True)):
            server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker)
            endpoint = Endpoint(await server.start())
            members.append(member(f"w{number}", PREFILL, endpoints=(endpoint,)))
        yield cache, members
    finally:
        await cache.close()
        await channels.close()
        for server in servers:
            await server.stop()


async def test_a_bundle_in_pieces_is_fetched_once_for_all_who_wait() -> None:
    holder = Holder((GOOD[:1000], GOOD[1000:]))
    async with holding(holder) as (cache, members):
        first, *others = await asyncio.gather(*(cache.get(DIGEST, members) for _ in range(5)))
        assert all(other is first for other in others)
        assert await cache.get(DIGEST, members) is first
        assert holder.calls == 1
        assert first.bundle == bundle()


async def test_a_caller_that_goes_away_does_not_take_the_fetch_with_it() -> None:
    async with holding(Holder((GOOD,))) as (cache, members):
        impatient = asyncio.create_task(cache.get(DIGEST, members))
        patient = asyncio.create_task(cache.get(DIGEST, members))
        await asyncio.wait({impatient}, timeout=0)
        impatient.cancel()
        assert (await patient).bundle == bundle()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Holder((b"not a bundle",)), "msgpack"),
        (Holder((GOOD[:-1],)), "bundle"),
        (Holder((GOOD,), total=len(GOOD) + 1), "tokenizer bytes"),
        (Holder((GOOD,), total=1 << 40), "tokenizer bytes"),
        # What no reader of bundles would take is not waited for.
        (Holder((GOOD,), total=MAX_BUNDLE_BYTES + 1, stuck=True), "tokenizer bytes"),
        (Holder(()), "not here"),
    ],
)
async def test_a_wrong_bundle_is_refused_and_the_next_worker_is_asked(bad: Holder, why: str) -> None:
    async with holding(bad, Holder((GOOD,))) as (cache, members):
        with pytest.raises(Unavailable, match=why) as caught:
            await cache.get(DIGEST, members[:1])
        assert caught.value.reason == "NO_TOKENIZER_BUNDLE"
        assert (await cache.get(DIGEST, members)).bundle == bundle()


async def test_a_sound_bundle_of_another_digest_is_refused() -> None:
    async with holding(Holder((GOOD,))) as (cache, members):
        with pytest.raises(Unavailable, match="not the one asked for"):
            await cache.get(b"x" * 32, members)


async def test_the_cache_is_bounded() -> None:
    other = replace(bundle(), chat_template="{{ messages[0].content }}")
    first, second = Holder((GOOD,)), Holder((other.to_bytes(),))
    async with holding(first, second, limit=1) as (cache, members):
        for _ in range(2):
            await cache.get(DIGEST, members[:1])
            await cache.get(other.digest(), members[1:])
        assert (first.calls, second.calls) == (2, 2)


def of_tokenizer(worker: Member, of: Bundle) -> Member:
    contract = replace(worker.record.contract, tokenizer_digest=of.digest())
    return replace(worker, record=replace(worker.record, contract=contract))


async def test_what_the_pools_models_need_is_fetched_before_the_first_request_as_far_as_there_is_room() -> None:
    other, third = (replace(bundle(), chat_template=f"{n}{{{{ messages[0].content }}}}") for n in "bc")
    workers = [Holder((each.to_bytes(),)) for each in (bundle(), other, third)]
    async with holding(*workers, limit=2) as (cache, members):
        served = [of_tokenizer(*each) for each in zip(members, (bundle(), other, third), strict=True)]
        starting = replace(served[1], record=replace(served[1].record, state=STARTING))
        for _ in range(3):
            cache.prepare([served[0], starting])
        assert (await cache.get(DIGEST, [])).bundle == bundle(), "nobody is asked now"
        assert [worker.calls for worker in workers] == [1, 0, 0]
        cache.prepare(served)
        with pytest.raises(Unavailable):  # of two there is room for one
            await asyncio.gather(cache.get(other.digest(), []), cache.get(third.digest(), []))


async def test_a_bundle_that_cannot_be_fetched_is_not_asked_for_with_every_snapshot() -> None:
    broken = Holder(())
    async with holding(broken) as (cache, members):
        members = [of_tokenizer(members[0], bundle())]
        cache.prepare(members)
        with pytest.raises(Unavailable):
            await cache.get(DIGEST, members)
        cache.prepare(members)
        assert broken.calls == 1
        with pytest.raises(Unavailable):  # a request asks again
            await cache.get(DIGEST, members)
        assert broken.calls == 2


async def test_text_needs_a_tokenizer_and_ids_do_not() -> None:
    assert await encode(TokenPrompt((1, 2)), None, ROOM) == (1, 2)
    for prompt in (TextPrompt("hello"), ChatPrompt(({"role": "user", "content": "hello"},))):
        with pytest.raises(InvalidRequest) as caught:
            await encode(prompt, None, ROOM)
        assert caught.value.reason == "NO_TOKENIZER"


class Watched(Tokenizer):
    """Notes the thread of every encoding."""

    thread = 0

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        self.thread = threading.get_ident()
        return super().encode(text, add_special=add_special)


def chat(*messages: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple({"role": role, "content": content} for role, content in messages))


@pytest.mark.parametrize(
    ("prompt", "inline"),
    [
        (TextPrompt("short"), True),
        (chat(("user", "short")), True),
        (TextPrompt("long " * 500), False),
        (chat(("user", "long " * 500)), False),
        (chat(("long " * 500, "")), False),
        (chat(*[("u", "")] * 100), False),
    ],
)
async def test_only_what_is_short_in_every_way_is_encoded_on_the_event_loop(prompt: Prompt, inline: bool) -> None:
    tokenizer = Watched(bundle())
    assert await encode(prompt, tokenizer, Room(4000, 4000))
    assert (tokenizer.thread == threading.get_ident()) is inline


@pytest.mark.parametrize("kind", [TextPrompt, lambda text: chat(("user", text)), lambda text: chat((text, "x"))])
async def test_what_cannot_fit_is_refused_before_it_is_encoded(kind: Callable[[str], Prompt]) -> None:
    tokenizer = Watched(bundle())
    most = tokenizer.most_bytes(ROOM.prompt)
    await encode(kind("the " * (most // 8)), tokenizer, ROOM)  # its tokens decide
    tokenizer.thread = 0
    with pytest.raises(InvalidRequest) as caught:
        await encode(kind("é" * (most // 2 + 1)), tokenizer, ROOM)
    assert (caught.value.reason, caught.value.field, tokenizer.thread) == ("PROMPT_TOO_LONG", "prompt", 0)


async def test_the_number_of_messages_is_bounded() -> None:
    tokenizer = Tokenizer(bundle())
    messages = (("u", ""),) * MAX_MESSAGES
    assert await encode(chat(*messages), tokenizer, Room(100_000, 100_000))
    with pytest.raises(InvalidRequest) as caught:
        await encode(chat(*messages, ("u", "")), tokenizer, Room(100_000, 100_000))
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_MESSAGES", "messages")
