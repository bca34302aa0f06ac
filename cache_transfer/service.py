"""The Transfer service over gRPC: bytes in, bytes out, so that push.py reads frames in place."""

from __future__ import annotations

from typing import Any

import grpc

from cache_transfer.messages import Request, Response
from cache_transfer.push import decode_request, encode_response
from cache_transfer.receiver import Receiver

SERVICE = "pdserve.v1.Transfer"

_Context = grpc.aio.ServicerContext[Any, Any]


class TransferService:
    """Serves `receiver`. Errors become statuses in the server's interceptor (pdserve.rpc.served)."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Push(self, _requests: object, context: _Context) -> None:
        await self._receiver.receive(_GrpcReceiverStream(context))


def register(service: TransferService, server: Any) -> None:
    """For `pdserve.rpc.server.Server.add`; like the generated registration, without its parsing."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(service.Push)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Push": handler}),))


class _GrpcReceiverStream:
    def __init__(self, context: _Context) -> None:
        self._context = context

    async def read(self) -> Request | None:
        data = await self._context.read()
        return decode_request(data) if isinstance(data, bytes) else None

    async def write(self, message: Response) -> None:
        await self._context.write(encode_response(message))
