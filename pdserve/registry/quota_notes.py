"""What a router says of its tenants' limits to others: notes, each of some of its tenants <-> bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pdserve.errors import InvalidRequest
from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.v1 import registry_pb2 as pb


@dataclass(frozen=True)
class Usage:
    """Of one tenant, by one router since it started; what is owed, by all routers as far as it knows."""

    requests: int = 0
    tokens: int = 0
    running: int = 0
    requests_owed: float = 0.0
    tokens_owed: float = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.requests_owed or self.tokens_owed)


_MOST = Usage(2**64 - 1, 2**64 - 1, 2**32 - 1, 1.0, 1.0)  # the longest that a message says it


def parts_of(tenants: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Tenants by the note that tells of them: as few notes as hold them all, whatever they use; 212 or more in each.

    Which of them a tenant is in never changes while a router runs, so that each note has sums of its own.
    """
    parts: list[list[str]] = []
    room = 0
    for name in sorted(tenants):
        size = _message({name: _MOST}).ByteSize()
        if not parts or size > room:
            parts.append([])
            room = MAX_NOTE_BYTES
        parts[-1].append(name)
        room -= size
    return tuple(map(tuple, parts))


def note_of(said: Mapping[str, Usage]) -> bytes:
    """`said` is of one part."""
    return _message(said).SerializeToString()


def read_note(note: bytes) -> dict[str, Usage]:
    """Raises InvalidRequest for what no router says: whoever writes to the Redis may have written anything."""
    try:
        message = pb.TenantsUsed.FromString(note)
    except DecodeError:
        raise _malformed("it is no message of this kind") from None
    said: dict[str, Usage] = {}
    for one in message.tenants:
        if not one.tenant or one.tenant in said:
            raise _malformed("a tenant has no name, or is in it twice")
        for owed in (one.requests_owed, one.tokens_owed):
            if not (math.isfinite(owed) and owed >= 0):
                raise _malformed("what is owed is no number")
        said[one.tenant] = Usage(one.requests, one.tokens, one.running, one.requests_owed, one.tokens_owed)
    return said


def _message(said: Mapping[str, Usage]) -> pb.TenantsUsed:
    return pb.TenantsUsed(tenants=[pb.TenantUsed(tenant=name, **vars(usage)) for name, usage in said.items()])


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"a router's note on limits cannot be used: {problem}",
        reason="MALFORMED",
        field="tenants",
        remedy="see who else writes to this Redis",
    )
