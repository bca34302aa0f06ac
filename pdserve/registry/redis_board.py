"""A board on which routers that share a Redis tell each other what may help, and nothing depends on.

    {prefix}prefixes   stream of {by, text}: the newest MAX_NOTES; expires an hour after the last note

One exchange is one round trip: it writes a note and reads those of others since the last one.
"""

from __future__ import annotations

import secrets

from pdserve.registry.redis_link import RedisLink

MAX_NOTES = 256  # on the board
MAX_NOTE_BYTES = 64 << 10  # so at most 16 MiB in all
_AT_ONCE = 64  # notes read by one exchange

_EXCHANGE = """
if ARGV[1] ~= '' then
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], '*', 'by', ARGV[2], 'text', ARGV[1])
end
redis.call('EXPIRE', KEYS[1], 3600)
return redis.call('XRANGE', KEYS[1], ARGV[3], '+', 'COUNT', ARGV[5])
"""


class RedisBoard:
    """Belongs to one event loop; the link is the registry's, which closes it."""

    def __init__(self, link: RedisLink, key: str) -> None:
        self._link = link
        self._key = key
        self._me = secrets.token_bytes(8)
        self._read = "-"  # where the next exchange begins to read
        self._script = link.script(_EXCHANGE)

    async def exchange(self, note: bytes) -> tuple[bytes, ...]:
        """Writes a note of at most MAX_NOTE_BYTES (empty: none), and returns others' that are new, oldest first.

        A new reader, or one that had trouble, is given everything on the board. Raises Unavailable.
        """
        since, self._read = self._read, "-"
        rows = await self._link.run(self._script, [self._key], [note, self._me, since, MAX_NOTES, _AT_ONCE])
        self._read = f"({rows[-1][0].decode()}" if rows else since
        fields = (dict(zip(flat[::2], flat[1::2], strict=False)) for _, flat in rows)
        return tuple(each[b"text"] for each in fields if each.get(b"by") != self._me and b"text" in each)
