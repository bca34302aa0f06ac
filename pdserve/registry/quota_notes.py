"""What a router says of its tenants' limits to others: one note for all tenants <-> bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def note_of(said: Mapping[str, Usage]) -> bytes:
    """What fits of it, those who use something now first: some 1,500 tenants."""
    chosen: list[pb.TenantUsed] = []
    room = MAX_NOTE_BYTES - 1024
    for name, usage in sorted(said.items(), key=lambda item: not item[1].busy):
        one = pb.TenantUsed(tenant=name, **vars(usage))
        room -= one.ByteSize() + 4
        if room < 0:
            break
        chosen.append(one)
    return pb.TenantsUsed(tenants=chosen).SerializeToString()


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


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"a router's note on limits cannot be used: {problem}",
        reason="MALFORMED",
        field="tenants",
        remedy="see who else writes to this Redis",
    )
