"""What each router on a Redis says now, in place of what it said before, and how long ago that was.

    {prefix}quotas   hash {router: "MILLISECONDS note"}, on the server's clock; expires an hour after the last note

One exchange is one round trip: it replaces this router's note and reads the others'. Notes are states, not news, so
one that is read twice, or not at all, does no harm. Who says nothing for KEEP_S is dropped, and so is what no router
wrote; a hash with more than MAX_ROUTERS is begun anew, as every living router is in it again with its next note.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.registry.redis_link import RedisLink

KEEP_S = 120  # after which everything that a minute's limit was charged has come back
MAX_ROUTERS = 256  # so at most 16 MiB in all

_EXCHANGE = """
local key, me, note = KEYS[1], ARGV[1], ARGV[2]
local keep_ms, most, most_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local dropped = 0
local kind = redis.call('TYPE', key).ok
if kind ~= 'hash' and kind ~= 'none' or kind == 'hash' and redis.call('HLEN', key) > most then
  redis.call('DEL', key)
  dropped = 1
end
redis.call('HSET', key, me, now .. ' ' .. note)
redis.call('EXPIRE', key, 3600)
local found = {}
local rows = redis.call('HGETALL', key)
for at = 1, #rows, 2 do
  local by, row = rows[at], rows[at + 1]
  local space = #row <= most_bytes + 32 and string.find(row, ' ', 1, true)
  local said = space and tonumber(string.sub(row, 1, space - 1))
  local good = said and said >= 0 and said <= now + keep_ms
  if not good or said < now - keep_ms then
    redis.call('HDEL', key, by)
    if not good then dropped = dropped + 1 end
  elseif by ~= me then
    found[#found + 1] = {by, math.max(0, now - said), string.sub(row, space + 1)}
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

    def __init__(self, link: RedisLink, key: str) -> None:
        self._link = link
        self._key = key
        self._me = secrets.token_bytes(8)
        self._script = link.script(_EXCHANGE)
        self.dropped = 0  # entries that no router wrote

    async def exchange(self, note: bytes) -> tuple[LatestNote, ...]:
        """Says `note`, of at most MAX_NOTE_BYTES, and returns what others say. Raises Unavailable."""
        limits = (KEEP_S * 1000, MAX_ROUTERS, MAX_NOTE_BYTES)
        dropped, rows = await self._link.run(self._script, [self._key], [self._me, note, *limits])
        self.dropped += dropped
        return tuple(LatestNote(by, age_ms / 1000, text) for by, age_ms, text in rows)
