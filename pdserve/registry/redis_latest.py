"""What each router on a Redis says now, in place of what it said before, and how long ago that was.

    {prefix}quota:{router}   its note, further ones as {router}.1, {router}.2; each expires KEEP_S later
    {prefix}quotas           set of those names; one without a note is removed by the next exchange

One exchange is one round trip: it replaces this router's notes and reads the others', MAX_NOTES of them drawn anew each
time if there are more. Notes are states, not news, so one that is read twice, or not until later, does no harm. What no
router wrote is removed and counted; a set with more than MAX_NAMES is begun anew, as every living router is in it again
with its next notes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.registry.redis_link import RedisLink

KEEP_S = 120  # after which everything that a minute's limit was charged has come back
MAX_NOTES = 1024  # of all routers, read by one exchange: at most 64 MiB
MAX_NAMES = 4096  # with a note, or with one that has expired

_EXCHANGE = """
local index, prefix, keep = KEYS[1], ARGV[1], tonumber(ARGV[2])
local dropped = 0
local kind = redis.call('TYPE', index).ok
if kind ~= 'none' and (kind ~= 'set' or redis.call('SCARD', index) > tonumber(ARGV[5])) then
  redis.call('DEL', index)
  dropped = 1
end
local own = {}
for at = 6, #ARGV, 2 do
  redis.call('SET', prefix .. ARGV[at], ARGV[at + 1], 'PX', keep)
  redis.call('SADD', index, ARGV[at])
  own[ARGV[at]] = true
end
local found = {}
for _, by in ipairs(redis.call('SRANDMEMBER', index, ARGV[3])) do
  local key = prefix .. by
  local note, left = redis.pcall('GET', key), redis.call('PTTL', key)
  if own[by] then
  elseif not note then
    redis.call('SREM', index, by)
  elseif type(note) ~= 'string' or #note > tonumber(ARGV[4]) or left < 0 or left > keep then
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

    by: bytes  # the name of this note, until its router ends
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

    async def exchange(self, notes: Sequence[bytes]) -> tuple[LatestNote, ...]:
        """Says `notes`, each of at most MAX_NOTE_BYTES and the same number of them every time, and returns what others
        say. Raises Unavailable.
        """
        named = [(f"{self._me}.{number}" if number else self._me, note) for number, note in enumerate(notes)]
        args = [self._notes, KEEP_S * 1000, MAX_NOTES, MAX_NOTE_BYTES, MAX_NAMES, *chain.from_iterable(named)]
        dropped, rows = await self._link.run(self._script, [self._index], args)
        self.dropped += dropped
        return tuple(LatestNote(by, age_ms / 1000, text) for by, age_ms, text in rows)
