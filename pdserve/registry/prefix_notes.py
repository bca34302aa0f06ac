"""What a router sent where, as it tells others: one note for many prompts <-> bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pdserve.registry.redis_board import MAX_NOTE_BYTES
from pdserve.registry.wire import INCARNATION_BYTES
from pdserve.v1 import registry_pb2 as pb

log = logging.getLogger(__name__)

KEY_BYTES = 16  # of one block's name
MAX_BLOCKS = 1024  # of one prompt
_WORKERS = 8  # of one prompt
_ROOM = MAX_NOTE_BYTES - 1024


@dataclass(frozen=True)
class Sent:
    """One prompt, and the boots of the workers that have computed or received it."""

    keys: tuple[bytes, ...]  # of its blocks, in order, KEY_BYTES each
    incarnations: tuple[bytes, ...]


def note_of(news: Iterable[Sent]) -> bytes:
    """The newest of it that fits. Empty for nothing."""
    chosen: list[pb.SentPrefix] = []
    room = _ROOM
    for sent in reversed(list(news)):
        one = pb.SentPrefix(incarnations=sent.incarnations, links=b"".join(sent.keys))
        room -= one.ByteSize() + 8
        if room < 0:
            break
        chosen.append(one)
    return pb.SentPrefixes(sent=reversed(chosen)).SerializeToString()


def read_note(note: bytes) -> Iterator[Sent]:
    """What can be read of it: whoever writes to the Redis may have written anything."""
    try:
        message = pb.SentPrefixes.FromString(note)
    except DecodeError:
        log.warning("a note on prefixes cannot be read and is left out")
        return
    for one in message.sent:
        size, rest = divmod(len(one.links), KEY_BYTES)
        good = not rest and 0 < size <= MAX_BLOCKS and 0 < len(one.incarnations) <= _WORKERS
        if not good or any(len(each) != INCARNATION_BYTES for each in one.incarnations):
            log.warning("a prefix of another router is malformed and is left out")
            continue
        keys = tuple(one.links[at : at + KEY_BYTES] for at in range(0, len(one.links), KEY_BYTES))
        yield Sent(keys, tuple(one.incarnations))
