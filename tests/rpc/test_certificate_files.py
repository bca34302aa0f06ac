"""Files of certificates: read again when they change, named where they cannot be used, and signed again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pdserve.errors import ConfigError, Unavailable
from pdserve.rpc.channel import ChannelPool, channel
from pdserve.rpc.server import Server
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.rpc.tls import CLIENT, ROUTER, WORKER, Identity
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from tests.rpc.certificates import ALL, ask, ask_over, gateway, make_certificates, no_models, rpc_of
from tests.rpc.gateway import ScriptedGateway, serving


async def test_new_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    """Server and client change to another authority while one call goes on over the old connection."""
    folder = make_certificates(tmp_path / "mine")
    others = make_certificates(tmp_path / "others")
    served, waiting, ending = rpc_of(folder, ROUTER), asyncio.Event(), asyncio.Event()

    async def slow(request: Any, context: Any) -> gateway_pb2.StatusResponse:
        waiting.set()
        await ending.wait()
        return gateway_pb2.StatusResponse(version="old and good")

    async with serving(ScriptedGateway(models=no_models, status=slow), served) as server:
        pool = ChannelPool(rpc_of(folder, CLIENT), peer=ROUTER)
        first = pool.get(server.address)
        running = asyncio.ensure_future(gateway_pb2_grpc.GatewayStub(first).Status(gateway_pb2.StatusRequest()))
        await waiting.wait()
        assert isinstance(await ask(server.address, rpc_of(others, CLIENT)), Unavailable)

        for role in (ROUTER, CLIENT):
            for name in ("ca.crt", "tls.crt", "tls.key"):
                shutil.copy(others / role / name, folder / role / name)
        second = pool.get(server.address)
        assert second is not first
        assert await ask_over(second, server.address) is None
        assert await ask(server.address, rpc_of(others, CLIENT)) is None
        assert pool.get(server.address) is second

        ending.set()
        assert (await running).version == "old and good"
        await pool.close()


async def test_a_mounted_secret_that_kubernetes_replaces_is_read_again(tmp_path: Path) -> None:
    """The kubelet changes one link, to a folder with all of the new files; those that are named stay links into it."""
    for version in ("old", "new"):
        make_certificates(tmp_path / version)
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(tmp_path / "old" / ROUTER)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(Path("..data") / name)
    async with gateway(RpcSettings(tls=TlsSettings.of_folder(mount))) as address:
        assert await ask(address, rpc_of(tmp_path / "old", CLIENT)) is None
        (mount / "..data_tmp").symlink_to(tmp_path / "new" / ROUTER)
        (mount / "..data_tmp").replace(mount / "..data")
        assert await ask(address, rpc_of(tmp_path / "new", CLIENT)) is None
        assert await ask(address, rpc_of(tmp_path / "old", CLIENT)) is not None


async def test_a_damaged_file_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_certificates(tmp_path)
    async with gateway(rpc_of(folder, ROUTER)) as address:
        good = (folder / ROUTER / "tls.key").read_bytes()
        (folder / ROUTER / "tls.key").write_bytes(good[: len(good) // 2])
        assert await ask(address, rpc_of(folder, CLIENT)) is None
        assert "the certificate stays as it was" in caplog.text
        assert "PRIVATE KEY" not in caplog.text
        (folder / ROUTER / "tls.key").unlink()
        assert await ask(address, rpc_of(folder, CLIENT)) is None


@pytest.mark.parametrize(
    ("damaged", "field"), [("ca.crt", "ca_file"), ("tls.crt", "key_file"), ("tls.key", "key_file")]
)
async def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, damaged: str, field: str) -> None:
    folder = make_certificates(tmp_path) / ROUTER
    for content in (b"nothing", None):
        if content is None:
            (folder / damaged).unlink()
        else:
            (folder / damaged).write_bytes(content)
        for use in (server_start, opened):
            with pytest.raises(ConfigError) as caught:
                await use(RpcSettings(tls=TlsSettings.of_folder(folder)))
            assert caught.value.field == f"rpc.tls.{field}" or content is None
            assert caught.value.field.startswith("rpc.tls.") and caught.value.remedy


async def server_start(settings: RpcSettings) -> None:
    await Server(settings).start()


async def opened(settings: RpcSettings) -> None:
    channel("127.0.0.1:1", settings)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    mixed = TlsSettings(str(folder / ROUTER / "tls.crt"), str(folder / WORKER / "tls.key"), str(folder / "ca.crt"))
    with pytest.raises(ConfigError) as caught:
        Identity(mixed).current()
    assert caught.value.field == "rpc.tls.key_file"


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_two_of_three_files_are_not_enough(missing: str) -> None:
    files = {name: "x.pem" for name in ("cert_file", "key_file", "ca_file") if name != missing}
    with pytest.raises(ConfigError) as caught:
        RpcSettings(tls=TlsSettings(**files))
    assert caught.value.field == f"rpc.tls.{missing}"


def test_signing_again_keeps_the_authority(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    before = {f: f.read_bytes() for f in sorted(folder.rglob("*.crt"))}
    make_certificates(folder, "--days", "30", "--host", "llm.example.org")
    after = {f: f.read_bytes() for f in sorted(folder.rglob("*.crt"))}
    authority = folder / "ca.crt"
    assert before.keys() == after.keys() and before[authority] == after[authority]
    assert all(before[folder / role / "tls.crt"] != after[folder / role / "tls.crt"] for role in ALL)
    router = x509.load_pem_x509_certificate(after[folder / ROUTER / "tls.crt"])
    names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["router.pdserve", "localhost", "llm.example.org"]


@pytest.mark.parametrize("damage", ["ca.key", "ca.crt"])
def test_a_folder_without_a_whole_authority_is_not_signed_in(tmp_path: Path, damage: str) -> None:
    folder = make_certificates(tmp_path)
    (folder / damage).write_text("nothing")
    before = (folder / WORKER / "tls.crt").read_bytes()
    with pytest.raises(ConfigError):
        make_certificates(folder)
    assert (folder / WORKER / "tls.crt").read_bytes() == before
