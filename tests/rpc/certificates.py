"""Certificates for tests, made by the command that operators use, and a gateway that shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.errors import PdserveError
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.rpc.status import from_rpc_error
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from tests.rpc.gateway import ScriptedGateway, serving

ALL = (WORKER, ROUTER, OPERATOR, CLIENT)


def make_certificates(folder: Path, *options: str) -> Path:
    """FOLDER/{worker,router,operator,client}; signs again when FOLDER has an authority."""
    result = CliRunner().invoke(app, ["certificates", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


def rpc_of(folder: Path, role: str) -> RpcSettings:
    return RpcSettings(tls=TlsSettings.of_folder(folder / role))


async def no_models(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
    return gateway_pb2.ListModelsResponse()


async def ask(address: str, settings: RpcSettings | None, peer: str = ROUTER) -> PdserveError | None:
    """What a listing of models fails with."""
    async with channel(address, settings, peer=peer) as link:
        return await ask_over(link, address)


async def ask_over(link: grpc.aio.Channel, address: str) -> PdserveError | None:
    stub = gateway_pb2_grpc.GatewayStub(link)
    try:
        await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5.0)
    except grpc.RpcError as error:
        return from_rpc_error(error, address)
    return None


@asynccontextmanager
async def gateway(settings: RpcSettings) -> AsyncIterator[str]:
    async with serving(ScriptedGateway(models=no_models), settings) as server:
        yield server.address
