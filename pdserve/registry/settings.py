"""How a process finds the registry and how often it reports."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ConfigError


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of workers (heartbeats) and routers (snapshots) alike."""

    url: str = "memory://"
    """memory:// (a router's own), grpc://HOST:PORT (a router that serves one), or
    redis://USER:PASSWORD@HOST:PORT/DATABASE; rediss:// is the same over TLS. Better than a password in
    here: `username` with `password_env` or `password_file`. A Redis that fails over: several HOST:PORT between
    commas, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE."""

    lease_s: float = 5.0
    """Seconds a worker stays listed after its last heartbeat."""

    heartbeat_s: float = 1.0
    """Seconds between heartbeats; at most half of `lease_s`, so that one may be lost."""

    timeout_s: float = 2.0
    """Longest wait for one answer of the registry."""

    key_prefix: str = "pdserve:"
    """Redis only: begins every key, so that installations can share a database."""

    username: str = ""
    """Redis only: user to log in as; empty: Redis' default user."""

    password_env: str = ""
    """Redis only: environment variable that holds the password."""

    password_file: str = ""
    """Redis only: file that holds the password, instead of a variable."""

    sentinel_login: bool = False
    """redis+sentinel:// only: Sentinels ask for the user and password, too."""

    ca_file: str = ""
    """rediss:// only: PEM file of the authorities that the server's certificate may come from; empty: the system's."""

    cert_file: str = ""
    """rediss:// only: PEM file of this process's own certificate, where the server asks for one."""

    key_file: str = ""
    """rediss:// only: PEM file of the key of `cert_file`."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "heartbeat_s", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{value!r} is not allowed", field=f"registry.{name}", remedy="use seconds above 0")
        if self.heartbeat_s > self.lease_s / 2:
            raise ConfigError(
                f"{self.heartbeat_s!r} is more than half of lease_s ({self.lease_s!r})",
                field="registry.heartbeat_s",
                remedy="send heartbeats more often, or lengthen the lease",
            )
