"""A registry in Redis, shared by any number of routers.

Keys, all under one prefix:

    {prefix}worker:{id}   hash {incarnation, record, state, load, lease_ms}, expires with the lease
    {prefix}workers       set of ids; ids whose hash is gone are removed by the next snapshot
    {prefix}birth         made by the first snapshot, expires when none is taken for an hour; a reader
                          that finds another one than before knows that the server lost its memory

`record` and `load` are serialized protobuf. Each method is one script, so that comparing
the incarnation and acting on it cannot be torn apart; leases run on the server's clock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio
from google.protobuf.message import DecodeError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from pdserve.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.registry.memory import not_registered
from pdserve.registry.records import LiveRecord, Load, WorkerRecord
from pdserve.registry.wire import load_from_proto, load_to_proto, record_from_proto, record_to_proto
from pdserve.v1 import gateway_pb2, registry_pb2

log = logging.getLogger(__name__)

_REGISTER = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'record', ARGV[3],
           'state', ARGV[4], 'load', ARGV[5], 'lease_ms', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
_HEARTBEAT = """
local row = redis.call('HMGET', KEYS[1], 'incarnation', 'lease_ms')
if row[1] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'load', ARGV[3])
redis.call('PEXPIRE', KEYS[1], row[2])
return 1
"""
_DEREGISTER = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
"""
_SNAPSHOT = """
local birth = redis.call('GET', KEYS[2]) or ARGV[2]
redis.call('SET', KEYS[2], birth, 'EX', 3600)
local rows = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  local row = redis.pcall('HMGET', key, 'record', 'state', 'load')
  if row['err'] then
    rows[#rows + 1] = {id, false, false, false, 0}
  elseif row[1] then
    rows[#rows + 1] = {id, row[1], row[2], row[3], redis.call('PTTL', key)}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return {birth, rows}
"""


class RedisRegistry:
    """One event loop. Connects on first use, and again by itself after an outage."""

    def __init__(self, url: str, key_prefix: str = "pdserve:", timeout_s: float = 2.0) -> None:
        """
        Args:
            url: redis://[user[:password]@]host[:port][/database], rediss:// for TLS; TLS files
                as query arguments (ssl_ca_certs, ssl_certfile, ssl_keyfile).
            timeout_s: longest time for any method, connecting included.

        Raises ConfigError for a URL that cannot be used.
        """
        self.address = redis_address(url)
        written = urlsplit(url).password or ""
        self._secrets = {written, unquote(written)}  # in every form that a text could show
        self._prefix = key_prefix
        self._timeout_s = timeout_s
        self._birth = b""  # of the server's memory, as last seen
        try:
            self._client: Any = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # One retry at once replaces a connection that went stale; longer trouble is the caller's to wait out.
                retry=Retry(NoBackoff(), 1),
            )
        except (ValueError, TypeError) as error:
            raise _bad_url(self.address, self._scrub(str(error))) from None
        self._secrets.add(self._client.connection_pool.connection_kwargs.get("password") or "")  # a query's, too
        self._bad: dict[bytes, str] = {}  # records that the last snapshot left out, and why
        self._register = self._client.register_script(_REGISTER)
        self._heartbeat = self._client.register_script(_HEARTBEAT)
        self._deregister = self._client.register_script(_DEREGISTER)
        self._snapshot = self._client.register_script(_SNAPSHOT)

    async def register(self, record: WorkerRecord) -> None:
        message = record_to_proto(record)
        record_from_proto(message)  # refuse here what a reader would have to skip
        await self._run(
            self._register(
                keys=[self._key(record.worker_id), self._index],
                args=[
                    record.worker_id,
                    record.incarnation,
                    message.SerializeToString(),
                    record.state,
                    load_to_proto(record.load).SerializeToString(),
                    message.lease_ms,
                ],
            )
        )

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        args: list[bytes | str] = [incarnation, state, load_to_proto(load).SerializeToString()]
        if not await self._run(self._heartbeat(keys=[self._key(worker_id)], args=args)):
            raise not_registered(worker_id)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        await self._run(self._deregister(keys=[self._key(worker_id), self._index], args=[worker_id, incarnation]))

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        """See Registry. A record that cannot be read is left out, with a warning in the log.

        Unavailable, too, when the server has lost its memory since the last snapshot, as by a restart
        too short to be noticed: what it knows now is not who there is.
        """
        keys, new = [self._index, f"{self._prefix}birth"], secrets.token_bytes(16)
        birth, rows = await self._run(self._snapshot(keys=keys, args=[self._key(""), new]))
        known, self._birth = self._birth or birth, birth
        if birth != known:
            raise self._unavailable("it has lost its memory", "wait: workers come back with their next heartbeat")
        bad: dict[bytes, str] = {}
        live = [read for row in rows if (read := _read(row, bad)) is not None]
        for worker_id, problem in bad.items():
            if self._bad.get(worker_id) != problem:  # said once, not at every refresh
                log.warning("a worker record in Redis %s and is left out: %r", problem, worker_id)
        self._bad = bad
        return tuple(sorted(live, key=lambda each: each.record.worker_id))

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def _index(self) -> str:
        return f"{self._prefix}workers"

    def _key(self, worker_id: str) -> str:
        return f"{self._prefix}worker:{worker_id}"

    async def _run(self, call: Awaitable[Any]) -> Any:
        async with self._errors():
            async with asyncio.timeout(self._timeout_s):
                return await call

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError:
            raise self._unavailable(f"no answer within {self._timeout_s:g} s") from None
        except AuthenticationError as error:
            raise self._unavailable(str(error), "check the user and password in registry.url") from None
        except (RedisError, OSError) as error:
            # `from None`: the original may hold the URL, and with it the password.
            raise self._unavailable(str(error)) from None

    def _unavailable(self, text: str, remedy: str = "") -> Unavailable:
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


def redis_address(url: str) -> str:
    """The URL without user and password, for people. Raises ConfigError when it has no host or a bad port."""
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError:
        raise _bad_url(f"{parts.scheme}://...", "the port is not a number") from None
    if not parts.hostname:
        raise _bad_url(f"{parts.scheme}://...", "there is no host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path}"


def _bad_url(shown: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not a Redis URL: {problem}",
        reason="BAD_URL",
        field="registry.url",
        remedy="use redis://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of the password percent-encoded",
    )


def _read(row: list[Any], bad: dict[bytes, str]) -> LiveRecord | None:
    """None for a record that cannot be used; what is wrong with it goes to `bad`."""
    worker_id, record, state, load, left_ms = row
    if record is None or state is None or load is None:
        bad[worker_id] = "lacks fields"
        return None
    try:
        message = registry_pb2.WorkerRecord.FromString(record)
        message.status.state = state.decode()
        read = record_from_proto(message)
        read = replace(read, load=load_from_proto(gateway_pb2.Load.FromString(load)))
    except (DecodeError, InvalidRequest, UnicodeDecodeError) as error:
        bad[worker_id] = f"cannot be read ({error})"
        return None
    return LiveRecord(read, max(0, left_ms) / 1000)
