"""What a part of a deployment says of itself when an operator asks: version, clock, and when its certificates end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError
from pdserve.rpc.settings import TlsSettings
from pdserve.rpc.status import to_detail
from pdserve.rpc.tls import Identity
from pdserve.v1 import worker_pb2

GRPC, HTTP = "grpc", "http"
CERTIFICATE_ENDS = "When the certificate of a listener ends, in Unix seconds; 0: it cannot be read"  # of a metric


@dataclass(frozen=True)
class Certificate:
    """The files that a listener would use at its next handshake."""

    listener: str  # GRPC | HTTP
    names: tuple[str, ...] = ()
    not_after_s: int = 0  # Unix seconds
    authority_not_after_s: int = 0  # of the authority that ends first
    error: PdserveError | None = None  # why they could not be read


def certificate(listener: str, settings: TlsSettings) -> Certificate:
    """Reads the files now. Raises nothing: what is wrong with them is in the answer."""
    try:
        pem = Identity(settings).load()
        own = x509.load_pem_x509_certificates(pem.chain)[0]
        authorities = x509.load_pem_x509_certificates(pem.authorities)
    except ConfigError as error:
        return Certificate(listener, error=error)
    except ValueError as error:
        wrong = ConfigError(f"not PEM: {error}", field="rpc.tls", remedy="name files with certificates in PEM")
        return Certificate(listener, error=wrong)
    return Certificate(
        listener,
        _names(own),
        int(own.not_valid_after_utc.timestamp()),
        min(int(authority.not_valid_after_utc.timestamp()) for authority in authorities),
    )


def part_report(certificates: tuple[Certificate, ...]) -> worker_pb2.PartReport:
    return worker_pb2.PartReport(
        version=__version__,
        clock_ms=clock_ms(),
        certificates=[
            worker_pb2.CertificateReport(
                listener=c.listener,
                names=c.names,
                not_after_s=c.not_after_s,
                authority_not_after_s=c.authority_not_after_s,
                error=None if c.error is None else to_detail(c.error),
            )
            for c in certificates
        ],
    )


def clock_ms() -> int:
    """Unix milliseconds: for comparing clocks, and for nothing that measures a time."""
    return time.time_ns() // 1_000_000


def disk_of(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _names(of: x509.Certificate) -> tuple[str, ...]:
    try:
        found = of.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(found.get_values_for_type(x509.DNSName))
