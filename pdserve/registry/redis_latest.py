"""What each router on a Redis says now, in place of what it said before, and how long ago that was.

    {prefix}quota:{router}   its note; expires KEEP_S later
    {prefix}quotas           set of those routers; who has no note any more is removed by the next exchange

One exchange is one round trip: it replaces this router's note and reads the others'. Notes are states, not news, so
one that is read twice, or not at all, does no harm. What no router wrote is removed and counted; a set with more than
MAX_ROUTERS is begun anew, as every living router is in it again with its next note.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.registry.redis_link import RedisLink

KEEP_S = 120  # after which everything that a minute's limit was charged has come back
MAX_ROUTERS = 256  # so at most 16 MiB in all

_EXCHANGE = """
local index, prefix, me, keep = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local dropped = 0
local kind = redis.call('TYPE', index).ok
if kind ~= 'none' and (kind ~= 'set' or redis.call('SCARD', index) > tonumber(ARGV[5])) then
  redis.call('DEL', index)
  dropped = 1
end
redis.call('SET', prefix .. me, ARGV[3], 'PX', keep)
redis.call('SADD', index, me)
local found = {}
for _, by in ipairs(redis.call('SMEMBERS', index)) do
  local key = prefix .. by
  local note, left = redis.pcall('GET', key), redis.call('PTTL', key)
  if by == me then
  elseif not note then
    redis.call('SREM', index, by)
  elseif type(note) ~= 'string' or #note > tonumber(ARGV[6]) or left < 0 or left > keep then
    redis.call('DEL', key)
    redis.call('SREM', index, by)
    dropped = dropped + 1
  else
    found[#found + 1] = {by, keep - left, note}
  end
end
return {dropped, found}
"""


@dataclass(frozen=True)
class LatestNote:
    """Of another router."""

    by: bytes  # a name that it has until it ends
    age_s: float
    text: bytes


class RedisLatest:
    """Belongs to one event loop; the link is the registry's, which closes it."""

    def __init__(self, link: RedisLink, key_prefix: str) -> None:
        self._link = link
        self._index, self._notes = f"{key_prefix}quotas", f"{key_prefix}quota:"
        self._me = secrets.token_hex(8)
        self._script = link.script(_EXCHANGE)
        self.dropped = 0  # entries that no router wrote

    async def exchange(self, note: bytes) -> tuple[LatestNote, ...]:
        """Says `note`, of at most MAX_NOTE_BYTES, and returns what others say. Raises Unavailable."""
        args = [self._notes, self._me, note, KEEP_S * 1000, MAX_ROUTERS, MAX_NOTE_BYTES]
        dropped, rows = await self._link.run(self._script, [self._index], args)
        self.dropped += dropped
        return tuple(LatestNote(by, age_ms / 1000, text) for by, age_ms, text in rows)
