"""Where a Redis is: one server, several of which one is the primary, or Sentinels that know which.

redis://HOST:PORT/DATABASE                               rediss:// is the same over TLS
redis://HOST:PORT,HOST:PORT/DATABASE                     whichever takes writes
redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DATABASE    the primary of SERVICE, as these Sentinels say
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pdserve.errors import ConfigError

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, repr=False)  # it holds a password
class RedisPlace:
    """What a URL says."""

    scheme: str
    login: str  # as in the URL: USER:PASSWORD@, or empty
    hosts: tuple[tuple[str, int], ...]  # of Redis, or of Sentinel
    service: str  # empty: no Sentinel
    database: str
    query: str

    @property
    def tls(self) -> bool:
        return self.scheme.startswith("rediss")

    @property
    def sentinel(self) -> bool:
        return self.scheme.endswith("+sentinel")

    def url(self, host: str, port: int) -> str:
        """Of one server, as redis-py reads it; secrets included."""
        query = f"?{self.query}" if self.query else ""
        return f"{'rediss' if self.tls else 'redis'}://{self.login}{_address(host, port)}/{self.database}{query}"

    def __str__(self) -> str:
        """For people: no secrets."""
        path = "/".join(filter(None, (self.service, self.database)))
        return f"{self.scheme}://{','.join(_address(*each) for each in self.hosts)}" + (f"/{path}" if path else "")


def parse(url: str) -> RedisPlace:
    """Raises ConfigError for what is no such URL; nothing that may be secret is repeated."""
    parts = urlsplit(url)
    shown = f"{parts.scheme}://..."
    login, at, hosts = parts.netloc.rpartition("@")
    sentinel = parts.scheme.endswith("+sentinel")
    path = parts.path.strip("/").split("/")
    service = unquote(path.pop(0)) if sentinel and path else ""
    if sentinel and not service:
        raise bad_url(shown, "the service that Sentinel knows is not named")
    if len(path) > 1 or not (path == [""] or not path or path[0].isdecimal()):
        raise bad_url(shown, "the database is not a number")
    default = _SENTINEL_PORT if sentinel else _PORT
    places = tuple(_host(shown, host, default) for host in hosts.split(","))
    return RedisPlace(parts.scheme, login + at, places, service, path[0] if path else "", parts.query)


def _host(shown: str, text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port or default
    except ValueError:
        raise bad_url(shown, "the port is not a number") from None
    if not parts.hostname:
        raise bad_url(shown, "there is no host")
    return parts.hostname, port


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bad_url(shown: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not a Redis URL: {problem}",
        reason="BAD_URL",
        field="registry.url",
        remedy="use redis://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of the password percent-encoded",
    )
