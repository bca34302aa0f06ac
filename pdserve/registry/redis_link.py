"""Commands to a Redis that may restart, move or refuse, within a time, with errors that say which of these it was.

Everything here is a script that writes, so a replica refuses it: that is how a list of servers is searched for the
primary. The server that answered last is asked first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from pdserve.errors import Unavailable
from pdserve.registry.redis_url import RedisPlace, bad_url, parse

_TOO_OLD = "use Redis 6.2 or later, with none of its commands renamed"
_REMEDIES = {
    "OOM": "raise its maxmemory, or delete what else is in it",
    "MISCONF": "let it save its data again, or turn stop-writes-on-bgsave-error off",
    "READONLY": "name the primary in registry.url, or all servers, or Sentinels",
    "unknown command": _TOO_OLD,  # HELLO, before 6.0
    "Unknown Redis command": _TOO_OLD,  # of a script
    "Invalid stream ID": _TOO_OLD,  # a range that leaves out its first, before 6.2
}


class RedisLink:
    """One event loop. Connects on first use, and again by itself after an outage."""

    def __init__(self, url: str, timeout_s: float = 2.0, *, sentinel_login: bool = False) -> None:
        """
        Args:
            url: see redis_url.py; TLS files as query arguments (ssl_ca_certs, ssl_certfile, ssl_keyfile).
            timeout_s: longest time for any command, connecting and a search for the primary included.
            sentinel_login: Sentinels take the user and password, too.

        Raises ConfigError for a URL that cannot be used.
        """
        place = parse(url)
        self.address = str(place)
        self._timeout_s = timeout_s
        self._secrets = {place.login.partition(":")[2].rstrip("@")}
        self._sentinels: list[Any] = []
        self._current = 0
        try:
            options: dict[str, Any] = {**parse_url(place.url(*place.hosts[0]))}
            self._secrets.add(options.get("password") or "")  # decoded, and a query's, too
            self._servers = tuple(str(host) for host in place.hosts)
            self._clients = self._by_sentinel(place, options, sentinel_login) if place.sentinel else self._all(place)
        except (ValueError, TypeError) as error:
            raise bad_url(self.address, self._scrub(str(error))) from None

    @property
    def server(self) -> str:
        """The one that answered last; another one than before has taken over."""
        if self._sentinels:
            return str(self._clients[0].connection_pool.master_address)
        return self._servers[self._current]

    def script(self, text: str) -> Any:
        return self._clients[0].register_script(text)

    async def run(self, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """What the script returns. Raises Unavailable."""
        async with self._errors():
            async with asyncio.timeout(self._timeout_s):
                return await self._run(script, keys, args)

    async def close(self) -> None:
        for client in (*self._clients, *self._sentinels):
            await client.aclose()

    async def _run(self, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Each server once, beginning with the one that answered last."""
        left = count = len(self._clients)
        while True:
            client, left = self._clients[self._current], left - 1
            try:
                async with asyncio.timeout(self._timeout_s / count):
                    return await script(keys=keys, args=args, client=client)
            except (RedisError, OSError, TimeoutError) as error:
                if isinstance(error, ResponseError) and not _moved(error):
                    raise
                # Sentinel is asked anew for each new connection.
                await client.connection_pool.disconnect(inuse_connections=False)
                self._current = (self._current + 1) % count
                if not left:
                    raise

    def _all(self, place: RedisPlace) -> list[Any]:
        limits = self._limits(len(place.hosts))
        return [redis.asyncio.Redis.from_url(place.url(*host), **limits) for host in place.hosts]

    def _by_sentinel(self, place: RedisPlace, options: dict[str, Any], login: bool) -> list[Any]:
        for name in ("host", "port", "connection_class"):
            options.pop(name, None)
        options |= {"ssl": place.tls, **self._limits(1)}
        theirs = {name: value for name, value in options.items() if name != "db"}
        if not login:
            theirs = {name: value for name, value in theirs.items() if name not in ("username", "password")}
        make: Any = Sentinel  # it has no types
        sentinel = make(list(place.hosts), sentinel_kwargs=theirs, **options)
        self._sentinels = list(sentinel.sentinels)
        return [sentinel.master_for(place.service)]

    def _limits(self, servers: int) -> dict[str, Any]:
        return {
            "socket_timeout": self._timeout_s / servers,
            "socket_connect_timeout": self._timeout_s / servers,
            # One retry at once replaces a connection that went stale; longer trouble is the caller's to wait out.
            "retry": Retry(NoBackoff(), 1),
        }

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError:
            raise self.unavailable(f"no answer within {self._timeout_s:g} s") from None
        except AuthenticationError as error:
            raise self.unavailable(str(error), "check the user and password in registry.url") from None
        except (RedisError, OSError) as error:
            # `from None`: the original may hold the URL, and with it the password.
            text = str(error)
            raise self.unavailable(text, next((r for word, r in _REMEDIES.items() if word in text), "")) from None

    def unavailable(self, text: str, remedy: str = "") -> Unavailable:
        return Unavailable(
            f"the registry at {self.address} cannot be used: {self._scrub(text)}",
            reason="REGISTRY_UNAVAILABLE",
            field="registry.url",
            remedy=remedy or "start Redis there, or correct registry.url",
        )

    def _scrub(self, text: str) -> str:
        """A server that does not know a command repeats the words after it, which for HELLO and AUTH are secret."""
        text = text.partition(", with args beginning with")[0]
        for secret in sorted(self._secrets - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _moved(error: ResponseError) -> bool:
    """Whether it is not this server's fault but its role's: a replica, or one that is loading its data."""
    text = str(error)
    return any(word in text for word in ("READONLY", "LOADING", "MASTERDOWN"))
