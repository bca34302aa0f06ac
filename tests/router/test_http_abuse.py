"""HTTP clients that send too much, too slowly or too many: typed errors, and nothing that waits for ever."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdserve.errors import MAX_SHOWN, InvalidRequest
from pdserve.rpc.settings import RpcSettings
from router.http_protocol import MAX_HEADER_BYTES, HttpLimits
from router.http_server import HttpServer
from router.openai_http import reply
from router.openai_schema import MAX_ENTRIES, parse_body
from tests.router.support import MODEL, House, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
HUGE = "1" * 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(made: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as it:
        yield it


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        (f'"logit_bias": {{"{"1" * 5000}": 1}}', "logit_bias", "invalid_field"),
        (f'"logit_bias": {{"5": {HUGE}}}', "logit_bias", "invalid_field"),
        (f'"temperature": {HUGE}', "temperature", "invalid_temperature"),
        (f'"top_k": {HUGE}', "top_k", "invalid_top_k"),
        (f'"max_tokens": {HUGE}, "max_completion_tokens": 1{HUGE}', "max_tokens", "invalid_field"),
        (f'"logprobs": true, "top_logprobs": {HUGE}', "top_logprobs", "invalid_field"),
        (f'"stop": "{"y" * 100_000}"', "stop", "invalid_stop"),
        (f'"{"k" * 100_000}": 1', f"{'k' * MAX_SHOWN}...", "unknown_field"),
        (f'"model": "{"m" * 100_000}"', "model", "model_not_found"),
        (f'"messages": {json.dumps([{"role": "u", "content": ""}] * 4097)}', "messages", "too_many_messages"),
        (f'"stop_token_ids": {[1] * 1025}', "stop_token_ids", "invalid_stop_token_ids"),
        (f'"stop_token_ids": {[1] * (MAX_ENTRIES + 1)}', "body", "too_many_entries"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_large_values_are_refused_by_name_and_not_echoed(
    http: httpx.AsyncClient, given: str, param: str, code: str
) -> None:
    answer = await http.post(URL, content=f"{json.dumps(BASE)[:-1]}, {given}}}")
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), answer.text[:500]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert len(answer.content) < 10 * MAX_SHOWN


async def test_a_long_path_is_not_echoed(http: httpx.AsyncClient) -> None:
    answer = await http.get("/" + "p" * 10_000)
    assert answer.status_code == 404 and len(answer.content) < 10 * MAX_SHOWN


@pytest.mark.parametrize("nested", [[[]] * (MAX_ENTRIES // 2 + 1) * 2, {str(i): 0 for i in range(MAX_ENTRIES + 1)}])
async def test_entries_count_at_every_depth(nested: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps({**BASE, "user": {"deep": nested}}).encode())
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_ENTRIES", "body")


async def test_a_long_body_of_few_entries_is_read_as_a_short_one() -> None:
    text = "the cat [{, " * 100_000
    body = parse_body(json.dumps({**BASE, "messages": [{"role": "user", "content": text}]}).encode())
    assert body.messages[0].content == text
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps(text).encode()[:-1])
    assert caught.value.reason == "INVALID_JSON"


@asynccontextmanager
async def server(app: Any = None, tls: ssl.SSLContext | None = None, **limits: Any) -> AsyncIterator[HttpServer]:
    """An HTTP server that answers {} to anything."""
    given = HttpLimits(**({"connections": 8, "header_s": 10.0} | limits))
    made = HttpServer(app or reply(200, {}), "127.0.0.1", 0, RpcSettings(), given, tls)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def connection(to: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = to.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchange(to: HttpServer, data: bytes) -> tuple[int, Any]:
    """Status and JSON of what comes until the server closes the connection, which it must do by itself."""
    async with connection(to) as (reader, writer):
        writer.write(data)
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_header_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with server(header_s=0.2) as to:
        status, body = await exchange(to, sent)
    assert (status, body["error"]["param"]) == (408, "header")


async def test_the_time_for_a_header_begins_anew_with_each_request_and_not_with_each_byte() -> None:
    async with server(header_s=0.5) as to, connection(to) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            async with asyncio.timeout(5):
                assert b"200 OK" in await reader.readuntil(b"{}")
        dripping = iter(REQUEST * 100)
        received = asyncio.create_task(reader.read())
        async with asyncio.timeout(5):
            while not received.done():
                writer.write(bytes([next(dripping)]))
                await asyncio.wait({received}, timeout=0.2)
        assert b" 408 " in await received


async def test_the_rest_of_a_body_that_nobody_waits_for_does_not_hold_the_connection() -> None:
    async with server(header_s=0.3) as to, connection(to) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        async with asyncio.timeout(5):
            await reader.readuntil(b"{}")
        received = asyncio.create_task(reader.read())
        async with asyncio.timeout(5):
            while not received.done():
                writer.write(b"x")
                await asyncio.wait({received}, timeout=0.1)


async def test_a_header_has_a_largest_size() -> None:
    async with server() as to:
        status, body = await exchange(to, b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEADER_BYTES + 1))
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        async with connection(to) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (MAX_HEADER_BYTES // 2))
            await exchange(to, b"nonsense\r\n\r\n")  # meanwhile the first part has come
            writer.write(b"\r\n\r\n")
            async with asyncio.timeout(5):
                assert b"200 OK" in await reader.readuntil(b"{}")


@pytest.mark.parametrize("head", [b"GET /{} HTTP/1.1\r\n", b"GET /?{} HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: {}\r\n"])
async def test_a_header_that_comes_in_one_piece_has_the_same_largest_size(head: bytes) -> None:
    async with server() as to:
        whole = head.replace(b"{}", b"x" * (MAX_HEADER_BYTES + 1)) + b"Host: x\r\n\r\n"
        status, body = await exchange(to, whole)
    assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_what_is_no_http_gets_a_typed_error() -> None:
    async with server() as to:
        status, body = await exchange(to, b"\x16\x03\x01 nonsense\r\n\r\n")
        assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_a_body_of_two_lengths_is_refused() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with server() as to:
        status, body = await exchange(to, head + b"0\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body["error"]["param"]) == (400, "content-length")


async def test_an_idle_connection_is_closed() -> None:
    async with server(keep_alive_s=0.2) as to, connection(to) as (reader, writer):
        writer.write(REQUEST)
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"{}")


class Busy:
    """An application that answers nothing until it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.may = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.release()
        await self.may.wait()
        await reply(200, {})(scope, receive, send)


async def test_requests_beyond_the_limit_of_connections_are_told_so() -> None:
    app = Busy()
    async with server(app, connections=2) as to, AsyncExitStack() as held:
        busy = [await held.enter_async_context(connection(to)) for _ in range(2)]
        for _, writer in busy:
            writer.write(REQUEST)
            async with asyncio.timeout(5):
                await app.asked.acquire()
        silent = [await held.enter_async_context(connection(to)) for _ in range(4)]  # of whom the first two are dropped
        for reader, _ in silent[:2]:
            async with asyncio.timeout(5):
                assert await reader.read() == b""
        status, body = await exchange(to, REQUEST)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        app.may.set()
        async with asyncio.timeout(5):
            for reader, _ in busy:
                assert b"200 OK" in await reader.readuntil(b"{}")
            async with connection(to) as (reader, writer):  # there is a place again
                writer.write(REQUEST)
                assert b"200 OK" in await reader.readuntil(b"{}")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123"])
async def test_clients_without_a_whole_request_make_room_for_those_who_have_one(sent: bytes) -> None:
    """However many they are: they push out each other, and not somebody whose answer is under way."""
    app = Busy()
    async with server(app, connections=3) as to, AsyncExitStack() as held, asyncio.timeout(10):
        reader, writer = await held.enter_async_context(connection(to))
        writer.write(REQUEST)
        await app.asked.acquire()
        crowd = [await held.enter_async_context(connection(to)) for _ in range(9)]
        for _, each in crowd:
            each.write(sent)
        for dropped, _ in crowd[:7]:
            assert await dropped.read() == b""
        app.may.set()
        async with connection(to) as (other, asking):
            asking.write(REQUEST)
            assert b"200 OK" in await other.readuntil(b"{}")
        assert b"200 OK" in await reader.readuntil(b"{}")


async def test_stopping_does_not_wait_for_silent_connections() -> None:
    async with server() as to, connection(to), asyncio.timeout(5):
        await to.stop()
