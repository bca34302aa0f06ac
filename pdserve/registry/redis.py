"""A registry in Redis, shared by any number of routers.

Keys, all under one prefix:

    {prefix}worker:{id}   hash {incarnation, record, version, state, load, lease_ms}, expires with the lease;
                          `version` names the record's bytes, which a reader asks for only when it is new to it
    {prefix}workers       set of ids; ids whose hash is gone are removed by the next snapshot
    {prefix}prefixes      stream of what routers tell each other, see redis_board.py
    {prefix}quotas        set of routers that say what their tenants use, see redis_latest.py
    {prefix}birth         made by the first snapshot, expires when none is taken for an hour; a reader
                          that finds another one than before knows that the server lost its memory

`record` and `load` are serialized protobuf. Each method is one script, so that comparing
the incarnation and acting on it cannot be torn apart; leases run on the server's clock. A snapshot's rows come packed
in one value: the client reads an answer value by value, and gives nobody a turn before it has read all of a pool's.

A Redis that is full (maxmemory, noeviction) refuses a script whose first write takes memory. A heartbeat's first write
does not, so those who are registered stay; a snapshot's does, so routers hear of it and keep the pool that they know.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import secrets
from dataclasses import dataclass, replace
from typing import Literal

import msgpack
from google.protobuf.message import DecodeError

from pdserve.errors import InvalidRequest
from pdserve.registry.memory import id_taken, not_registered
from pdserve.registry.records import LiveRecord, Load, WorkerRecord
from pdserve.registry.redis_board import RedisBoard
from pdserve.registry.redis_latest import RedisLatest
from pdserve.registry.redis_link import RedisLink
from pdserve.registry.wire import (
    RECORDS_A_TURN,
    check_state,
    load_from_proto,
    load_to_proto,
    record_from_proto,
    record_to_proto,
)
from pdserve.rpc.background import in_turns
from pdserve.v1 import gateway_pb2, registry_pb2

log = logging.getLogger(__name__)

_REGISTER = """
local there = redis.call('HGET', KEYS[1], 'incarnation')
if ARGV[7] == '1' and there and there ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'record', ARGV[3],
           'state', ARGV[4], 'load', ARGV[5], 'lease_ms', ARGV[6], 'version', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
_HEARTBEAT = """
local row = redis.call('HMGET', KEYS[1], 'incarnation', 'lease_ms')
if row[1] ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], row[2])
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'load', ARGV[3])
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
  local row = redis.pcall('HMGET', key, 'version', 'state', 'load', 'incarnation')
  if row['err'] then
    rows[#rows + 1] = {id, false, false, false, 0}
  elseif row[4] then
    rows[#rows + 1] = {id, row[1], row[2], row[3], redis.call('PTTL', key)}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return {birth, cmsgpack.pack(rows)}
"""
_RECORDS = """
local found = {}
for at, id in ipairs(ARGV) do
  local row = redis.pcall('HMGET', KEYS[1] .. id, 'record', 'version')
  found[at] = row['err'] and {false, false} or row
end
redis.call('EXPIRE', KEYS[2], 3600)
return found
"""
_WAIT = "wait: workers come back with their next heartbeat"


_AT_ONCE = 64  # records read by one command, whose answer is read without a turn

Field = bytes | Literal[False]  # false: the hash lacks it
Row = tuple[bytes, Field, Field, Field, int]  # id, version, state, load, lease left in ms


@dataclass(frozen=True)
class Known:
    """A record, and the bytes that it was read from: most are the same at the next snapshot."""

    version: bytes | None
    state: Field
    load: Field
    record: WorkerRecord


class RedisRegistry:
    """One event loop. Connects on first use, and again by itself after an outage."""

    def __init__(
        self, url: str, key_prefix: str = "pdserve:", timeout_s: float = 2.0, *, sentinel_login: bool = False
    ) -> None:
        """See RedisLink."""
        self._link = RedisLink(url, timeout_s, sentinel_login=sentinel_login)
        self._prefix = key_prefix
        self._birth = b""  # of the server's memory, as last seen
        self._server = ""  # that gave the last snapshot
        self._known: dict[bytes, Known] = {}  # worker id -> its record as last read
        self._bad: dict[bytes, str] = {}  # records that the last snapshot left out, and why
        self._register = self._link.script(_REGISTER)
        self._heartbeat = self._link.script(_HEARTBEAT)
        self._deregister = self._link.script(_DEREGISTER)
        self._snapshot = self._link.script(_SNAPSHOT)
        self._records = self._link.script(_RECORDS)

    @property
    def address(self) -> str:
        """Without secrets."""
        return self._link.address

    def board(self) -> RedisBoard:
        """What routers tell each other, over the same connections."""
        return RedisBoard(self._link, f"{self._prefix}prefixes")

    def latest(self) -> RedisLatest:
        """What each router says of its tenants now."""
        return RedisLatest(self._link, self._prefix)

    def reader(self) -> RedisRegistry:
        """For another reader of snapshots, over the same connections: each hears by itself of a server that lost its
        memory or gave way to another. Is closed with this one.
        """
        other = copy.copy(self)
        other._birth, other._server, other._known, other._bad = b"", "", {}, {}
        return other

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        message = record_to_proto(record)
        record_from_proto(message)  # refuse here what a reader would have to skip
        data = message.SerializeToString(deterministic=True)
        taken = await self._link.run(
            self._register,
            keys=[self._key(record.worker_id), self._index],
            args=[
                record.worker_id,
                record.incarnation,
                data,
                record.state,
                load_to_proto(record.load).SerializeToString(),
                message.lease_ms,
                int(again),
                hashlib.sha256(data).digest()[:16],
            ],
        )
        if not taken:
            raise id_taken(record.worker_id)

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        args = [incarnation, state, load_to_proto(load).SerializeToString()]
        if not await self._link.run(self._heartbeat, [self._key(worker_id)], args):
            raise not_registered(worker_id)

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        keys = [self._key(worker_id), self._index]
        await self._link.run(self._deregister, keys, [worker_id, incarnation])

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        """See Registry. A record that cannot be read is left out, with a warning in the log.

        Unavailable, too, when the server has lost its memory since the last snapshot, as by a restart
        too short to be noticed, or another server has taken over: what it knows now may not be who there is.
        """
        keys, new = [self._index, f"{self._prefix}birth"], secrets.token_bytes(16)
        was, server = self._birth, self._server  # before anybody else's answer: each snapshot under way hears of it
        birth, packed = await self._link.run(self._snapshot, keys, [self._key(""), new])
        self._birth, self._server = birth, (now := self._link.server)
        if was not in (b"", birth):
            raise self._link.unavailable("it has lost its memory", _WAIT)
        if server not in ("", now):
            raise self._link.unavailable(f"{now} has taken over from {server}", _WAIT)
        bad: dict[bytes, str] = {}
        rows: list[Row] = msgpack.unpackb(packed, raw=True)
        known = await self._learn(rows, bad)
        read = [_read(row, known, bad) async for row in in_turns(rows)]
        self._known = known
        for worker_id, problem in bad.items():
            if self._bad.get(worker_id) != problem:  # said once, not at every refresh
                log.warning("a worker record in Redis %s and is left out: %r", problem, worker_id)
        self._bad = bad
        return tuple(sorted((live for live in read if live is not None), key=lambda each: each.record.worker_id))

    async def _learn(self, rows: list[Row], bad: dict[bytes, str]) -> dict[bytes, Known]:
        """What is known of these workers, after reading the records that are new here.

        A dict of this snapshot alone: others may be under way, and take their turns in between.
        """
        known = {row[0]: self._known[row[0]] for row in rows if row[0] in self._known}
        new = [row[0] for row in rows if row[1] is False or row[0] not in known or known[row[0]].version != row[1]]
        for start in range(0, len(new), _AT_ONCE):
            ids = new[start : start + _AT_ONCE]
            found = await self._link.run(self._records, [self._key(""), f"{self._prefix}birth"], ids)
            async for worker_id, (data, version) in in_turns(zip(ids, found, strict=True), RECORDS_A_TURN):
                known.pop(worker_id, None)
                if data is None:
                    bad[worker_id] = "lacks fields"
                    continue
                try:
                    record = record_from_proto(registry_pb2.WorkerRecord.FromString(data))
                except (DecodeError, InvalidRequest) as error:
                    bad[worker_id] = f"cannot be read ({error})"
                    continue
                known[worker_id] = Known(version, False, False, record)
        return known

    async def close(self) -> None:
        await self._link.close()

    @property
    def _index(self) -> str:
        return f"{self._prefix}workers"

    def _key(self, worker_id: str) -> str:
        return f"{self._prefix}worker:{worker_id}"


def _read(row: Row, known: dict[bytes, Known], bad: dict[bytes, str]) -> LiveRecord | None:
    """Notes in `known` what it has read. None for a record that cannot be used; what is wrong with it goes to `bad`."""
    worker_id, _, state, load, left_ms = row
    if worker_id not in known:
        bad.setdefault(worker_id, "lacks fields")
        return None
    if state is False or load is False:
        bad[worker_id] = "lacks fields"
        return None
    old = known[worker_id]
    if (old.state, old.load) != (state, load):
        try:
            read = load_from_proto(gateway_pb2.Load.FromString(load))
            record = replace(old.record, state=check_state(state.decode()), load=read)
        except (DecodeError, InvalidRequest, UnicodeDecodeError) as error:
            bad[worker_id] = f"cannot be read ({error})"
            return None
        known[worker_id] = old = Known(old.version, state, load, record)
    return LiveRecord(old.record, max(0, left_ms) / 1000)
