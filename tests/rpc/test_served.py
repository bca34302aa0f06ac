"""Errors of live handlers of every kind, seen from a real client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldDifference,
    Incompatible,
    Internal,
    InvalidRequest,
    PdserveError,
)
from pdserve.rpc.channel import channel
from pdserve.rpc.deadline import remaining_s
from pdserve.rpc.server import Server
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import from_rpc_error

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
ERROR = Incompatible(
    "the contracts differ", field="LAYERS", remedy="pair others", differences=(FieldDifference("LAYERS", "2", "3"),)
)


def behavior(kind: str, body: Callable[[Any], Any], *, answer_first: bool = False) -> Any:
    """A handler of the given kind that awaits `body(context)`; streams may send one message before."""

    async def single(request: Any, context: Any) -> bytes:
        await body(context)
        return b"end"

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        if answer_first:
            yield b"first"
        await body(context)
        yield b"end"

    return many if kind.endswith("_stream") else single


@asynccontextmanager
async def call(kind: str, handler: Any) -> AsyncIterator[Any]:
    """Serves `handler` through a generic handler; yields a function that makes the call and reads all answers."""
    server = Server()
    method = getattr(grpc, f"{kind}_rpc_method_handler")(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Do": method}),))
    address = await server.start()
    connection = channel(address)

    async def run(timeout: float = 5.0) -> list[bytes]:
        request = iter([b"x"]) if kind.startswith("stream") else b"x"
        made = getattr(connection, kind)("/test.Service/Do")(request, timeout=timeout)
        if not kind.endswith("_stream"):
            return [await made]
        return [answer async for answer in made]

    run.connection = connection  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        await connection.close()
        await server.stop()


async def failure(run: Any) -> tuple[grpc.StatusCode, PdserveError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run()
    return caught.value.code(), from_rpc_error(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_typed_errors_arrive_whole(kind: str) -> None:
    async def body(context: Any) -> None:
        raise ERROR

    async with call(kind, behavior(kind, body)) as run:
        code, error = await failure(run)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert type(error) is Incompatible
    assert vars(error) == vars(ERROR)


@pytest.mark.parametrize("kind", KINDS)
async def test_unexpected_errors_leak_nothing_and_are_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(context: Any) -> None:
        raise RuntimeError("secret-token")

    with caplog.at_level(logging.ERROR, "pdserve.rpc.served"):
        async with call(kind, behavior(kind, body)) as run:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await run()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret-token" not in repr(caught.value) + repr(caught.value.trailing_metadata())
    assert type(from_rpc_error(caught.value)) is Internal
    record = next(r for r in caplog.records if r.name == "pdserve.rpc.served")
    assert "/test.Service/Do" in record.getMessage()
    assert "secret-token" in str(record.exc_info)


@pytest.mark.parametrize("kind", KINDS)
async def test_success_is_untouched(kind: str) -> None:
    async def body(context: Any) -> None:
        return None

    async with call(kind, behavior(kind, body, answer_first=True)) as run:
        assert await run() == ([b"first", b"end"] if kind.endswith("_stream") else [b"end"])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_by_the_handler_is_kept(kind: str) -> None:
    async def body(context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")

    async with call(kind, behavior(kind, body)) as run:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "mine")


async def test_an_error_after_the_first_message_follows_it() -> None:
    async def body(context: Any) -> None:
        raise ERROR

    async with call("unary_stream", behavior("unary_stream", body, answer_first=True)) as run:
        made = run.connection.unary_stream("/test.Service/Do")(b"x", timeout=5)
        assert await made.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.read()
    assert type(from_rpc_error(caught.value)) is Incompatible


async def test_a_cancelled_status_from_the_server_is_typed() -> None:
    async def body(context: Any) -> None:
        raise Cancelled("stopped by its owner")

    async with call("unary_unary", behavior("unary_unary", body)) as run:
        code, error = await failure(run)
    assert code is grpc.StatusCode.CANCELLED
    assert type(error) is Cancelled


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_a_cancelled_call_closes_the_handlers_generator_at_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    closed = asyncio.Event()

    async def handler(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with call(kind, handler) as run:
        made = getattr(run.connection, kind)("/test.Service/Do")(
            iter([b"x"]) if kind == "stream_stream" else b"x", timeout=30
        )
        assert await made.read() == b"first"
        assert made.cancel()
        async with asyncio.timeout(5):
            await closed.wait()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_generator_that_never_stops_is_closed_while_it_sends() -> None:
    closed = asyncio.Event()

    async def handler(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
        finally:
            closed.set()

    async with call("unary_stream", handler) as run:
        made = run.connection.unary_stream("/test.Service/Do")(b"x", timeout=30)
        await made.read()
        assert made.cancel()
        async with asyncio.timeout(5):
            await closed.wait()


async def test_remaining_s_is_the_callers_deadline_or_the_default() -> None:
    seen: list[float] = []

    async def body(context: Any) -> None:
        seen.append(remaining_s(context, 99.0))

    async with call("unary_unary", behavior("unary_unary", body)) as run:
        await run(timeout=7.0)
        await run.connection.unary_unary("/test.Service/Do")(b"x")
    assert 0.0 < seen[0] < 7.5  # gRPC rounds a timeout up on its way
    assert seen[1] == 99.0


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_message_are_refused_before_the_handler(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    reached = []

    async def body(request: Any) -> None:
        async for message in request if kind.startswith("stream") else _once(request):
            reached.append(message)

    async def single(request: Any, context: Any) -> bytes:
        await body(request)
        return b"end"

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        await body(request)
        yield b"end"

    server = Server()
    method = getattr(grpc, f"{kind}_rpc_method_handler")(
        many if kind.endswith("_stream") else single,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=None,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Do": method}),))
    async with channel(await server.start()) as connection:
        raw = b"\x0a\xff\xff\xff\xff\x0f"
        made = getattr(connection, kind)("/test.Service/Do")(
            iter([raw]) if kind.startswith("stream") else raw, timeout=5.0
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in made] if kind.endswith("_stream") else await made
    await server.stop()
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason, error.field) == (InvalidRequest, "MALFORMED_MESSAGE", "message")
    assert not reached and not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_call_that_never_brings_its_message_is_ended_and_makes_room(kind: str, half_closed: bool) -> None:
    """Headers alone: such calls would fill a server, and a key is not needed for them."""
    reached = []

    async def body(context: Any) -> None:
        reached.append(context)

    server = Server(RpcSettings(call_timeout_s=0.2, max_concurrent_calls=4))
    method = getattr(grpc, f"{kind}_rpc_method_handler")(behavior(kind, body))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Do": method}),))
    async with channel(await server.start()) as connection:
        silent: list[Any] = [connection.stream_stream("/test.Service/Do")(timeout=20.0) for _ in range(4)]
        for one in silent:
            if half_closed:
                await one.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.read()
            error = from_rpc_error(caught.value)
            assert error.field == "message"
            assert isinstance(error, InvalidRequest if half_closed else DeadlineExceeded)
        assert not reached
        made = getattr(connection, kind)("/test.Service/Do")(b"x", timeout=5.0)
        assert await (made.read() if kind.endswith("_stream") else made) == b"end"
    await server.stop()


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
