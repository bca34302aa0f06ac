"""What every server here does around a handler: errors become statuses, streams are closed.

    bytes that are no message     -> INVALID_ARGUMENT, before the handler runs
    handler raises PdserveError   -> its status, with detail in the trailing metadata
    handler raises anything else  -> INTERNAL; the text stays in our log, with the traceback
    the caller cancels            -> CancelledError passes through

A response stream written as an async generator is closed the moment its call ends, so its
`finally` blocks run then and not whenever the garbage collector comes by.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdserve.errors import Internal, InvalidRequest, PdserveError
from pdserve.rpc.status import abort

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handler of every call, generic handlers included."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        # None means "no such method"; gRPC itself answers UNIMPLEMENTED.
        return handler and wrap(handler, handler_call_details.method)


def wrap(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler, with errors mapped. Synchronous handlers are returned as they are."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behavior: Behavior = getattr(handler, kind)
    parse = _parser(handler.request_deserializer, handler.request_streaming)
    if inspect.isasyncgenfunction(behavior):
        guarded = _guard_generator(behavior, parse, method)
    elif inspect.iscoroutinefunction(behavior):
        guarded = _guard_coroutine(behavior, parse, method)
    else:
        return handler
    make = getattr(grpc, f"{kind}_rpc_method_handler")
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
            raise InvalidRequest(
                "these bytes are not the message of this call",
                reason="MALFORMED_MESSAGE",
                field="message",
                remedy="generate the client from proto/pdserve/v1",
            ) from error

    async def many(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield one(data)

    return many if streaming else one


def _guard_coroutine(behavior: Behavior, parse: Callable[[Any], Any], method: str) -> Behavior:
    async def guarded(request: Any, context: Context) -> Any:
        async with _errors_as_status(context, method):
            return await behavior(parse(request), context)

    return guarded


def _guard_generator(behavior: Behavior, parse: Callable[[Any], Any], method: str) -> Behavior:
    async def guarded(request: Any, context: Context) -> None:
        async with _errors_as_status(context, method), aclosing(behavior(parse(request), context)) as responses:
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
