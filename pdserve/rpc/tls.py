"""Mutual TLS between the parts of one deployment: whose certificate is good, and what its role may call.

A certificate of the deployment's authority names what its holder is, as DNS names ROLE.DEPLOYMENT:

    worker.pdserve     a prefill or decode worker: pushes caches, announces itself
    router.pdserve     a router: asks workers for work
    operator.pdserve   a person or a tool of the operator's: looks, and looks after
    client.pdserve     a caller of the gateway; its tenant still comes from its API key

Both ends check. A server looks up in `MAY_CALL` what the caller's roles allow; a caller expects the
role that it wanted to reach, whatever the address. So a stolen client's certificate cannot play a worker.

Files are read again when they change: a server looks at each handshake, a pool of channels when
one is asked for. Connections that stand are left alone. What cannot be used is logged, and what
was good before stays.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pdserve.errors import ConfigError, PermissionDenied
from pdserve.rpc.settings import TlsSettings

log = logging.getLogger(__name__)

WORKER, ROUTER, OPERATOR, CLIENT = "worker", "router", "operator", "client"

MAY_CALL: Mapping[str, frozenset[str]] = {
    "pdserve.v1.Transfer": frozenset({WORKER}),
    "pdserve.v1.Prefill": frozenset({ROUTER}),
    "pdserve.v1.Decode": frozenset({ROUTER}),
    "pdserve.v1.Worker": frozenset({ROUTER, OPERATOR}),
    "pdserve.v1.Adapters": frozenset({ROUTER, OPERATOR}),
    "pdserve.v1.Registry": frozenset({WORKER, ROUTER, OPERATOR}),
    "pdserve.v1.Gateway": frozenset({CLIENT, OPERATOR, ROUTER}),
    "pdserve.v1.Operator": frozenset({OPERATOR, ROUTER}),
}
"""Service -> roles that may call it. Health and reflection are for whoever has a certificate."""

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pem:
    """What the three files held at one moment."""

    chain: bytes
    key: bytes
    authorities: bytes

    def server(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.authorities)

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


class Identity:
    """The files of one part as they are now. Not tied to a thread: a reload that runs twice does no harm."""

    def __init__(self, settings: TlsSettings) -> None:
        self.settings = settings
        self._seen: Stamp = ()
        self._pem: Pem | None = None

    def load(self) -> Pem:
        """The files' content. Raises ConfigError for a file that is missing or not PEM, and for the wrong key."""
        pem = Pem(*(_read(self.settings, name) for name in ("cert_file", "key_file", "ca_file")))
        _try(self.settings)
        return pem

    def current(self) -> Pem:
        """What was read last, or is new. Raises ConfigError only if the files could never be used."""
        stamp = self._stamp()
        if self._pem is None or stamp != self._seen:
            try:
                self._pem = self.load()
            except ConfigError as error:
                if self._pem is None:
                    raise
                log.warning("the certificate stays as it was: %s", error)
            else:
                if self._seen:
                    log.info("the certificate was read again from %s", self.settings.cert_file)
            self._seen = stamp
        return self._pem

    def _stamp(self) -> Stamp:
        found = []
        for file in (self.settings.cert_file, self.settings.key_file, self.settings.ca_file):
            try:
                status = Path(file).stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """Takes callers with a certificate of the authority's only. Raises ConfigError for files that cannot be used."""
    identity = Identity(settings)
    served = identity.current()

    def fresh() -> Any:
        nonlocal served
        found = identity.current()
        if found is served:
            return None  # gRPC keeps what it has
        served = found
        return found.server()

    return grpc.dynamic_ssl_server_credentials(served.server(), fresh, require_client_authentication=True)


def http_context(settings: TlsSettings, *, client_certificates: bool) -> ssl.SSLContext:
    """TLS for an HTTP listener, with or without certificates of its clients. Raises ConfigError.

    New files are used from the next handshake on.
    """
    identity = Identity(settings)
    served = identity.current()

    def made() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.ca_file)
        context.load_cert_chain(settings.cert_file, settings.key_file)
        context.verify_mode = ssl.CERT_REQUIRED if client_certificates else ssl.CERT_NONE
        return context

    def on_handshake(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal served
        found = identity.current()
        if found is not served:
            served, latest[0] = found, made()
        connection.context = latest[0]

    latest = [made()]
    first = made()
    first.sni_callback = on_handshake  # OpenSSL calls it for clients that name no server, too
    return first


def check_role(names: Iterable[bytes], method: str, deployment: str) -> None:
    """Raises PermissionDenied unless one of a caller's verified names may call `/SERVICE/METHOD`."""
    service = method.rpartition("/")[0].removeprefix("/")
    allowed = MAY_CALL.get(service)
    if allowed is None:
        return
    check_names((name.decode(errors="replace") for name in names), allowed, deployment, service)


def check_names(names: Iterable[str], roles: Iterable[str], deployment: str, what: str) -> None:
    """Raises PermissionDenied unless a caller has one of the roles that may do or see `what`."""
    good = {f"{role}.{deployment}" for role in roles}
    if not good.isdisjoint(names):
        return
    wanted = " or ".join(sorted(good))
    raise PermissionDenied(
        f"the caller's certificate does not allow {what}",
        reason="ROLE",
        field="certificate",
        remedy=f"use a certificate for {wanted}",
    )


def _read(settings: TlsSettings, name: str) -> bytes:
    file = getattr(settings, name)
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}", field=f"rpc.tls.{name}", remedy="name a PEM file"
        ) from error


def _try(settings: TlsSettings) -> None:
    """OpenSSL reads the files as gRPC will, and says what it thinks of them; gRPC would only fail each handshake."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{settings.ca_file} holds no certificate", field="rpc.tls.ca_file", remedy="name the authority's PEM file"
        ) from None
    try:
        # The callback keeps OpenSSL from asking the terminal for a passphrase.
        context.load_cert_chain(settings.cert_file, settings.key_file, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{settings.cert_file} and {settings.key_file} are no certificate and its key",
            field="rpc.tls.key_file",
            remedy="name the PEM files of one pair, the key without a passphrase",
        ) from None
