"""`pdserve certificates`: an authority of your own and a certificate for each role.

For machines without a certificate manager. Whatever issues certificates in your company or cluster
serves as well: all that is asked is the name ROLE.DEPLOYMENT among a certificate's DNS names.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.cli.console import out
from pdserve.errors import ConfigError
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER

Key = ec.EllipticCurvePrivateKey

REDIS = "redis"
BOTH_ENDS = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
LATE_CLOCK = timedelta(minutes=5)  # of a machine that is to take a certificate issued now


def certificates(
    folder: Annotated[Path, typer.Argument(help="Made if missing. An authority that is there signs again.")],
    days: Annotated[
        int, typer.Option(min=1, help="Until the certificates expire; the authority lasts ten times as long.")
    ] = 90,
    deployment: Annotated[str, typer.Option(help="As [rpc.tls] deployment.")] = "pdserve",
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address under which HTTP clients reach the router. Repeatable.")
    ] = None,
    redis: Annotated[
        list[str] | None,
        typer.Option(help="Make FOLDER/redis, too, for a Redis that is reached under this name. Repeatable."),
    ] = None,
) -> None:
    """Make certificates for mutual TLS: FOLDER/{worker,router,operator,client} with tls.crt, tls.key, ca.crt.

    Run it again before they expire: the files are replaced, and running parts read them without a restart.
    FOLDER/ca.key signs; keep it where no part can read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, authority = _authority(folder, days, deployment)
    parts = {role: [f"{role}.{deployment}"] for role in (WORKER, ROUTER, OPERATOR, CLIENT)}
    parts[ROUTER] += ["localhost", *(host or ())]
    if redis:
        parts[REDIS] = [*redis]  # no role: it may call nothing here, and is taken for no part
    for part, names in parts.items():
        place = folder / part
        place.mkdir(exist_ok=True)
        own = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(names, own, key, authority, days)
        # The key goes last: until both are there, a part that looks finds no pair and keeps what it has.
        _write(place / "ca.crt", _pem(authority))
        _write(place / "tls.crt", _pem(signed))
        _write(place / "tls.key", _secret(own))
        out.print(f"{place}: {', '.join(names)}, until {signed.not_valid_after_utc:%Y-%m-%d}", markup=False)


def _authority(folder: Path, days: int, deployment: str) -> tuple[Key, x509.Certificate]:
    """Reads what is there, or makes it. Raises ConfigError for files that are no authority."""
    key_file, file = folder / "ca.key", folder / "ca.crt"
    if key_file.exists() or file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            found = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{folder} holds no usable ca.key and ca.crt", field="folder", remedy="name another folder"
            ) from error
        if not isinstance(key, Key) or key.public_key() != found.public_key():
            raise ConfigError(f"{key_file} is not the key of {file}", field="folder", remedy="name another folder")
        return key, found
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{deployment} authority")])
    made = (
        _builder(name, name, key.public_key(), 10 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _secret(key))
    _write(file, _pem(made))
    return key, made


def _signed(names: list[str], own: Key, key: Key, authority: x509.Certificate, days: int) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    return (
        _builder(subject, authority.subject, own.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(BOTH_ENDS), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LATE_CLOCK)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _secret(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Replaces the file in one step, readable by its owner alone."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    part.replace(path)
