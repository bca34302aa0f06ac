"""What a sender makes of a stream that breaks: the receiver's own words, or that it was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cache_transfer.transport import PUSH_METHOD, RECEIVER_LOST, GrpcTransport
from pdserve.errors import DeadlineExceeded, Internal, PdserveError, PermissionDenied, Unavailable
from pdserve.rpc.channel import channel
from pdserve.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]


class Ending(grpc.GenericRpcHandler):
    """A Push that ends at once: with a bare status, as a broken transport or a proxy does, or with a detail of ours."""

    def __init__(self, end: grpc.StatusCode | PdserveError) -> None:
        self._end = end

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        assert details.method == PUSH_METHOD
        return grpc.stream_stream_rpc_method_handler(self._push)

    async def _push(self, messages: AsyncIterator[bytes], context: Context) -> None:
        if isinstance(self._end, PdserveError):
            await abort(context, self._end)
        await context.abort(self._end, "Received RST_STREAM")


@asynccontextmanager
async def ending(end: grpc.StatusCode | PdserveError) -> AsyncIterator[GrpcTransport]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Ending(end),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel(f"127.0.0.1:{port}") as link:
            yield GrpcTransport(link, "decode-a")
    finally:
        await server.stop(None)


async def failure(end: grpc.StatusCode | PdserveError) -> PdserveError:
    async with ending(end) as transport:
        stream = transport.open(10.0)
        with pytest.raises(PdserveError) as caught:
            await stream.receive()
        await stream.close()
        return caught.value


@pytest.mark.parametrize("code", ["INTERNAL", "UNKNOWN", "CANCELLED", "UNAVAILABLE"])
async def test_a_stream_that_breaks_unexplained_may_be_tried_again(code: str) -> None:
    error = await failure(grpc.StatusCode[code])
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retryable) == (RECEIVER_LOST, True)
    assert "decode-a" in error.message and "RST_STREAM" in error.message


@pytest.mark.parametrize(
    ("code", "kind"), [("DEADLINE_EXCEEDED", DeadlineExceeded), ("PERMISSION_DENIED", PermissionDenied)]
)
async def test_a_status_with_a_meaning_keeps_it(code: str, kind: type[PdserveError]) -> None:
    assert type(await failure(grpc.StatusCode[code])) is kind


@pytest.mark.parametrize("said", [Internal("a bug", reason="BUG"), Unavailable("going", reason="DRAINING")])
async def test_what_the_receiver_says_is_passed_on(said: PdserveError) -> None:
    error = await failure(said)
    assert (type(error), error.reason, error.retryable) == (type(said), said.reason, said.retryable)
