"""Mutual TLS of real servers and channels: who is let in, and for what."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import PermissionDenied, Unavailable
from pdserve.rpc.channel import channel
from pdserve.rpc.server import Server
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.rpc.tls import CLIENT, MAY_CALL, OPERATOR, ROUTER, WORKER
from pdserve.v1 import gateway_pb2
from tests.rpc.certificates import ALL, ask, ask_over, gateway, make_certificates, rpc_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_another_program_accepts_the_certificates(folder: Path) -> None:
    for role in ALL:
        for purpose in ("sslserver", "sslclient"):
            command = [
                "openssl",
                "verify",
                "-purpose",
                purpose,
                "-CAfile",
                folder / "ca.crt",
                folder / role / "tls.crt",
            ]
            assert subprocess.run(command, capture_output=True).returncode == 0
        assert (folder / role / "tls.key").stat().st_mode & 0o077 == 0
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0


async def test_only_certificates_of_this_deployment_are_let_in(folder: Path, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path / "strangers")
    # The right authority and a certificate of another one, so that only the server can object.
    mixed = TlsSettings(
        str(strangers / CLIENT / "tls.crt"), str(strangers / CLIENT / "tls.key"), str(folder / "ca.crt")
    )
    async with gateway(rpc_of(folder, ROUTER)) as address:
        assert await ask(address, rpc_of(folder, CLIENT)) is None
        for settings in (None, RpcSettings(allow_plaintext=True), rpc_of(strangers, CLIENT), RpcSettings(tls=mixed)):
            assert isinstance(await ask(address, settings), Unavailable)
        nobody = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
        override = (("grpc.ssl_target_name_override", "router.pdserve"),)
        async with grpc.aio.secure_channel(address, nobody, options=override) as link:
            assert isinstance(await ask_over(link, address), Unavailable)
        assert await ask(address, rpc_of(folder, CLIENT)) is None


@pytest.mark.parametrize("plays", [WORKER, CLIENT, OPERATOR])
async def test_a_server_must_be_what_the_caller_wanted(folder: Path, plays: str) -> None:
    """A stolen certificate of another role cannot take a router's place."""
    async with gateway(rpc_of(folder, plays)) as address:
        assert isinstance(await ask(address, rpc_of(folder, CLIENT)), Unavailable)


async def test_the_certificate_of_a_redis_is_no_role(tmp_path: Path) -> None:
    """It has the names that Redis is reached by, addresses among them; nobody takes its holder for a part."""
    folder = make_certificates(tmp_path, "--redis", "pdserve-redis", "--redis", "10.0.0.7")
    read = x509.load_pem_x509_certificate((folder / "redis" / "tls.crt").read_bytes())
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pdserve-redis"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    async with gateway(rpc_of(folder, ROUTER)) as address:
        refused = await ask(address, rpc_of(folder, "redis"))
        assert isinstance(refused, PermissionDenied) and refused.reason == "ROLE"
    async with gateway(rpc_of(folder, "redis")) as address:
        assert isinstance(await ask(address, rpc_of(folder, CLIENT)), Unavailable)


async def test_a_name_of_another_deployment_is_no_role(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "both")
    make_certificates(tmp_path / "both", "--deployment", "other")
    async with gateway(rpc_of(folder, ROUTER)) as address:
        error = await ask(address, rpc_of(tmp_path / "both", CLIENT))
    assert isinstance(error, PermissionDenied)
    assert (error.reason, error.field) == ("ROLE", "certificate")
    assert "client.pdserve" in error.remedy


async def test_each_service_takes_the_roles_that_need_it_and_no_others(folder: Path) -> None:
    """Every pair of a service and a role, at a server whose methods only end."""
    server = Server(rpc_of(folder, WORKER))
    server.add_generic_rpc_handlers(
        grpc.method_handlers_generic_handler(service, {"Try": grpc.stream_stream_rpc_method_handler(nothing)})
        for service in MAY_CALL
    )
    await server.start()
    let_in = set()
    try:
        for role in ALL:
            async with channel(server.address, rpc_of(folder, role)) as link:
                health = await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                assert health.status == health_pb2.HealthCheckResponse.SERVING  # for whoever has a certificate
                let_in |= {(service.rpartition(".")[2], role) for service in MAY_CALL if await may_try(link, service)}
    finally:
        await server.stop()
    assert let_in == {
        ("Transfer", WORKER),
        ("Prefill", ROUTER),
        ("Decode", ROUTER),
        ("Worker", ROUTER),
        ("Worker", OPERATOR),
        ("Registry", WORKER),
        ("Registry", ROUTER),
        ("Registry", OPERATOR),
        ("Adapters", ROUTER),
        ("Adapters", OPERATOR),
        ("Gateway", CLIENT),
        ("Gateway", OPERATOR),
        ("Gateway", ROUTER),
        ("Operator", OPERATOR),
        ("Operator", ROUTER),
    }


async def nothing(stream: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for data in stream:
        yield data


async def may_try(link: grpc.aio.Channel, service: str) -> bool:
    attempt: Any = link.stream_stream(f"/{service}/Try")
    call = attempt(iter((b"",)), timeout=5.0)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED, error
        return False
    return True


def test_every_service_of_this_project_has_roles() -> None:
    """One that is new cannot be forgotten: what the table lacks would be open to any certificate."""
    stubs = Path(gateway_pb2.__file__).parent.glob("*_pb2.py")
    modules = [importlib.import_module(f"pdserve.v1.{stub.stem}") for stub in stubs]
    services = {s.full_name for module in modules for s in module.DESCRIPTOR.services_by_name.values()}
    assert services == set(MAY_CALL)


async def test_with_certificates_other_machines_may_be_reached(folder: Path) -> None:
    """Plaintext needs leave there; this needs none."""
    server = Server(rpc_of(folder, WORKER), host="0.0.0.0")
    address = await server.start()
    await server.stop()
    async with channel(address.replace("0.0.0.0", "192.0.2.1"), rpc_of(folder, ROUTER)):
        pass


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_that_connects_and_says_nothing_is_dropped(folder: Path, encrypted: bool) -> None:
    settings = replace(rpc_of(folder, ROUTER) if encrypted else RpcSettings(), connect_timeout_s=0.2)
    async with gateway(settings) as address, asyncio.timeout(10):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.read()  # until the server has closed it
        writer.close()
        assert await ask(address, replace(settings, connect_timeout_s=5.0)) is None


async def test_old_protocols_are_refused(folder: Path) -> None:
    """No TLS below 1.2, whatever a caller offers."""
    mine = folder / CLIENT
    files: list[str | Path] = [
        "-CAfile",
        mine / "ca.crt",
        "-cert",
        mine / "tls.crt",
        "-key",
        mine / "tls.key",
        "-alpn",
        "h2",
    ]
    async with gateway(rpc_of(folder, ROUTER)) as address:
        for version, works in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
            command: list[str | Path] = [
                "openssl",
                "s_client",
                "-connect",
                address,
                version,
                "-cipher",
                "ALL:@SECLEVEL=0",
                *files,
            ]
            ended = await asyncio.to_thread(offered_nothing, command)
            assert (ended.returncode == 0) is works, ended.stderr.decode()


def offered_nothing(command: Sequence[str | Path]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=b"", capture_output=True, timeout=20)
