"""A Gateway whose methods each test writes itself: real servicer, real gRPC over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdserve.rpc.server import Server
from pdserve.rpc.settings import Options, RpcSettings
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc


class ScriptedGateway(gateway_pb2_grpc.GatewayServicer):
    def __init__(
        self,
        generate: Callable[[Any, Any], AsyncIterator[gateway_pb2.GenerateEvent]] | None = None,
        models: Callable[[Any, Any], Any] | None = None,
        status: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        for name, method in (("Generate", generate), ("ListModels", models), ("Status", status)):
            if method is not None:
                setattr(self, name, method)


@asynccontextmanager
async def serving(
    servicer: ScriptedGateway, settings: RpcSettings | None = None, extra_options: Options = ()
) -> AsyncIterator[Server]:
    server = Server(settings, extra_options=extra_options)
    server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, servicer)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
