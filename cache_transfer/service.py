"""The Transfer service over gRPC: bytes in, bytes out, so that push.py reads frames in place."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cache_transfer.messages import Request, Response
from cache_transfer.push import decode_request, encode_response
from cache_transfer.receiver import Receiver
from pdserve.telemetry.context import enter, received

SERVICE = "pdserve.v1.Transfer"

_SETTLE_S = 5.0

_Context = grpc.aio.ServicerContext[Any, Any]


class TransferService:
    """Serves `receiver`. Errors become statuses in the server's interceptor (pdserve.rpc.served)."""

    def __init__(self, receiver: Receiver, worker: str = "") -> None:
        """`worker`: its id, for logs."""
        self._receiver = receiver
        self._worker = worker

    async def Push(self, _requests: object, context: _Context) -> None:
        enter(received(context.invocation_metadata(), "decode", self._worker))
        stream = _GrpcReceiverStream(context)
        try:
            await self._receiver.receive(stream)
        finally:
            await stream.settle()


def register(service: TransferService, server: Any) -> None:
    """For `pdserve.rpc.server.Server.add`; like the generated registration, without its parsing."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(service.Push)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Push": handler}),))


class _GrpcReceiverStream:
    """A write that is cancelled half-way goes on by itself, and no status may be sent before its end.

    gRPC remembers only afterwards that initial metadata went out with the first message; a status
    sent meanwhile brings it a second time, which fails, and the sender waits for a status in vain.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._writing: asyncio.Task[None] | None = None

    async def read(self) -> Request | None:
        data = await self._context.read()
        return decode_request(data) if isinstance(data, bytes) else None

    async def write(self, message: Response) -> None:
        if self._writing is not None and not self._writing.done():
            await asyncio.wait((self._writing,))  # of a release that was given up half-way
        self._writing = asyncio.create_task(self._write(encode_response(message)))
        await asyncio.shield(self._writing)

    async def _write(self, data: bytes) -> None:
        await self._context.write(data)

    async def settle(self) -> None:
        """Waits for a write that nobody waits for any more; not for long, since its reader may be gone."""
        writing = self._writing
        if writing is None:
            return
        done, _ = await asyncio.wait((writing,), timeout=_SETTLE_S)
        if not done:
            writing.cancel()
        elif not writing.cancelled():
            writing.exception()  # the call's end says it, too
