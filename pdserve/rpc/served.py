"""What every server here does around a handler: errors become statuses, streams are closed.

    bytes that are no message     -> INVALID_ARGUMENT, before the handler runs
    no message within `message_s` -> DEADLINE_EXCEEDED; a stream of them is its handler's to bound
    handler raises PdserveError   -> its status, with detail in the trailing metadata
    handler raises anything else  -> INTERNAL; the text stays in our log, with the traceback
    the caller cancels            -> CancelledError passes through

A response stream written as an async generator is closed the moment its call ends, so its
`finally` blocks run then and not whenever the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdserve.errors import DeadlineExceeded, Internal, InvalidRequest, PdserveError
from pdserve.rpc.status import abort
from pdserve.rpc.tls import check_role

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
Take = Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]  # what the caller sent, still raw


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handler of every call, generic handlers included.

    Args:
        message_s: how long a call that brings one message may take to bring it.
        deployment: whose certificates callers show (tls.py); empty: they show none, and may call everything.
    """

    def __init__(self, message_s: float, deployment: str = "") -> None:
        self._message_s = message_s
        self._deployment = deployment

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        # None means "no such method"; gRPC itself answers UNIMPLEMENTED.
        return handler and wrap(handler, handler_call_details.method, self._message_s, self._deployment)


def wrap(
    handler: grpc.RpcMethodHandler[Any, Any], method: str, message_s: float, deployment: str = ""
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler, with errors mapped and roles checked. Synchronous handlers are returned as they are."""
    asks, answers = ("stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming))
    behavior: Behavior = getattr(handler, f"{asks}_{answers}")
    parse = _parser(handler.request_deserializer, handler.request_streaming)
    take = _take_stream if handler.request_streaming else _take_one(message_s)
    if deployment:
        take = _take_from(deployment, method, take)
    if inspect.isasyncgenfunction(behavior):
        guarded = _guard_generator(behavior, take, parse, method)
    elif inspect.iscoroutinefunction(behavior):
        guarded = _guard_coroutine(behavior, take, parse, method)
    else:
        return handler
    # gRPC would wait for a single message without limit, and count the call meanwhile: it is told of a stream.
    make = getattr(grpc, f"stream_{answers}_rpc_method_handler")
    # Bytes are parsed inside the guard: gRPC itself answers UNKNOWN to those that are no message.
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(guarded, None, handler.response_serializer)
    return wrapped


def _parser(deserialize: Callable[[bytes], Any] | None, streaming: bool) -> Callable[[Any], Any]:
    """From what gRPC hands over raw, one message or a stream of them, to what the behavior takes."""
    if deserialize is None:
        return lambda raw: raw

    def one(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise _malformed("these bytes are not the message of this call") from error

    async def many(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield one(data)

    return many if streaming else one


def _take_from(deployment: str, method: str, take: Take) -> Take:
    """Looks at the caller's certificate first, which gRPC has verified."""

    async def checked(stream: AsyncIterator[bytes], context: Context) -> Any:
        check_role(context.auth_context().get("x509_subject_alternative_name", ()), method, deployment)
        return await take(stream, context)

    return checked


async def _take_stream(stream: AsyncIterator[bytes], context: Context) -> Any:
    return stream


def _take_one(limit_s: float) -> Take:
    async def take(stream: AsyncIterator[bytes], context: Context) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                data = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message of this call did not come within {limit_s:g} s",
                field="message",
                remedy="send it with the call",
            ) from None
        if data is grpc.aio.EOF:
            raise _malformed("this call brought no message")
        return data

    return take


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        problem, reason="MALFORMED_MESSAGE", field="message", remedy="generate the client from proto/pdserve/v1"
    )


def _guard_coroutine(behavior: Behavior, take: Take, parse: Callable[[Any], Any], method: str) -> Behavior:
    async def guarded(stream: AsyncIterator[bytes], context: Context) -> Any:
        async with _errors_as_status(context, method):
            return await behavior(parse(await take(stream, context)), context)

    return guarded


def _guard_generator(behavior: Behavior, take: Take, parse: Callable[[Any], Any], method: str) -> Behavior:
    async def guarded(stream: AsyncIterator[bytes], context: Context) -> None:
        async with (
            _errors_as_status(context, method),
            aclosing(behavior(parse(await take(stream, context)), context)) as responses,
        ):
            async for response in responses:
                await context.write(response)

    return guarded


@asynccontextmanager
async def _errors_as_status(context: Context, method: str) -> AsyncIterator[None]:
    try:
        yield
    except PdserveError as error:
        await abort(context, error)
    except grpc.aio.BaseError:
        raise  # an abort by the handler itself, or the transport's own trouble
    except Exception:
        log.exception("%s failed", method)
        await abort(context, Internal("the server failed", remedy="see the server's log"))
