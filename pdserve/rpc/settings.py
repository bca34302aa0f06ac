"""Every number that shapes a connection, and the one place that turns them into gRPC options."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from pdserve.errors import ConfigError

MIB = 1 << 20

Options = tuple[tuple[str, int | str], ...]

_FILES = ("cert_file", "key_file", "ca_file")


@dataclass(frozen=True)
class TlsSettings:
    """The three files of one part, in PEM; see tls.py. None of them: no TLS. They are read again when they change."""

    cert_file: str = ""
    """This part's certificate, and the intermediate ones below the authority's, if any. In a configuration for all
    parts {role} in these paths stands for router or worker: each reads its own, as in "/etc/pdserve/{role}/tls.crt"."""

    key_file: str = ""
    """Its private key, without a passphrase."""

    ca_file: str = ""
    """The authority that signs every part of this deployment; two in one file while it changes."""

    deployment: str = "pdserve"
    """What certificates say after the role, as in worker.pdserve."""

    @classmethod
    def of_folder(cls, folder: Path, deployment: str = "pdserve") -> Self:
        """The files by the names that Kubernetes and `pdserve certificates` give them."""
        return cls(str(folder / "tls.crt"), str(folder / "tls.key"), str(folder / "ca.crt"), deployment)

    @property
    def enabled(self) -> bool:
        return bool(self.cert_file)

    def of_role(self, role: str) -> Self:
        """With the files of this part."""
        files = {name: getattr(self, name).replace("{role}", role) for name in _FILES}
        return replace(self, **files)

    def check(self) -> None:
        """Raises ConfigError when only some of the files are named. Nothing is read."""
        files = {name: getattr(self, name) for name in _FILES}
        for name, file in files.items():
            if any(files.values()) and not file:
                raise ConfigError("TLS needs all three files", field=f"rpc.tls.{name}", remedy="name a PEM file")
        if not self.deployment:
            raise ConfigError("it is empty", field="rpc.tls.deployment", remedy="write what certificates say")


@dataclass(frozen=True)
class RpcSettings:
    """Limits and times of servers and channels. Both ends of a connection should agree."""

    max_message_bytes: int = 4 * MIB + 64 * 1024
    """Largest message sent or taken: 4 MiB, and room for the fields around a payload."""

    max_metadata_bytes: int = 16 * 1024
    """Largest header or trailer taken; error details are trimmed to fit well inside."""

    keepalive_s: float = 20.0
    """A silent connection is probed this often, by both ends."""

    keepalive_timeout_s: float = 10.0
    """A probe without an answer for this long ends the connection."""

    min_ping_interval_s: float = 1.0
    """Servers take probes at least this far apart; keep it below every client's `keepalive_s`."""

    connect_timeout_s: float = 5.0
    """Longest attempt to connect; calls to a peer that stays silent fail after it, and a server drops one."""

    call_timeout_s: float = 10.0
    """Deadline of short unary calls that state none of their own."""

    max_reconnect_backoff_s: float = 2.0
    """Longest pause between two attempts to reach a peer that was lost."""

    max_concurrent_calls: int = 1024
    """Calls a server runs at once; more are refused with RESOURCE_EXHAUSTED."""

    allow_plaintext: bool = False
    """Permits unencrypted connections beyond this machine. Without it, and without TLS, only loopback is used."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificates, under [rpc.tls]. With them every connection is encrypted, on loopback too, and both ends
    show who they are."""

    def __post_init__(self) -> None:
        self.tls.check()
        numbers = {name: value for name, value in vars(self).items() if name not in ("allow_plaintext", "tls")}
        for name, value in numbers.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{value!r} is not allowed", field=f"rpc.{name}", remedy="use a number above 0")


def server_options(settings: RpcSettings, extra: Options = ()) -> Options:
    """Options of a server; `extra` replaces options of the same name."""
    return _merged(
        *_common_options(settings),
        # Two servers on one port would share its connections at random: fail instead.
        ("grpc.so_reuseport", 0),
        # TLS and the first words of HTTP/2, for which gRPC itself would wait two minutes.
        ("grpc.server_handshake_timeout_ms", _ms(settings.connect_timeout_s)),
        # A client may probe a silent stream for as long as it likes: no strikes, no GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(settings.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", 0),
        *extra,
    )


def channel_options(settings: RpcSettings, extra: Options = ()) -> Options:
    """Options of a channel; `extra` replaces options of the same name."""
    return _merged(
        *_common_options(settings),
        # A proxy from the environment must never see traffic between workers.
        ("grpc.enable_http_proxy", 0),
        # Channels do not share connections: closing one, or its backoff, touches no other.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name: how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", _ms(settings.connect_timeout_s)),
        ("grpc.max_reconnect_backoff_ms", _ms(settings.max_reconnect_backoff_s)),
        *extra,
    )


def _common_options(settings: RpcSettings) -> Options:
    return (
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.keepalive_time_ms", _ms(settings.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(settings.keepalive_timeout_s)),
        # Probes share their answer with gRPC's own pings, which by default may wait a minute for one.
        ("grpc.http2.ping_timeout_ms", _ms(settings.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _merged(*options: tuple[str, int | str]) -> Options:
    """The last of each name: gRPC itself would take the first."""
    return tuple(dict(options).items())


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `join_address`. Raises ConfigError unless it is host:port with a port of 1 to 65535."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ConfigError(
            f"{address!r} is not an address", reason="BAD_ADDRESS", field="address", remedy="use host:port"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean this machine. Names other than localhost never count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def check_plaintext(host: str, settings: RpcSettings) -> None:
    """Raises ConfigError when an unencrypted connection would leave this machine without leave."""
    if not settings.tls.enabled and not settings.allow_plaintext and not is_loopback(host):
        raise ConfigError(
            f"an unencrypted connection beyond this machine ({host!r}) is not permitted",
            reason="PLAINTEXT_REFUSED",
            field="allow_plaintext",
            remedy="use a loopback address such as 127.0.0.1, give certificates under [rpc.tls], or set "
            "allow_plaintext = true on a network you trust",
        )


def check_advertised(name: str, address: str, settings: RpcSettings) -> None:
    """Raises ConfigError naming the setting `name` unless others can connect to `address`; empty: none is set."""
    if not address:
        return
    try:
        host, _ = split_address(address)
        check_plaintext(host, settings)
    except ConfigError as error:
        problem = f"others cannot connect to {address!r}: {error.message}"
        raise ConfigError(problem, reason=error.reason, field=name, remedy=error.remedy) from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
