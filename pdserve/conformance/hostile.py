"""Streams that a receiver must refuse: what one is, and small tools to make them.

A maker gets the draft of a right stream with all heads of a plane in a frame, and two frames for
the tokens of each. The streams themselves are in bad_openings, bad_frames and bad_endings.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.conformance.streams import Draft
from pdserve.v1 import transfer_pb2 as pb

Make = Callable[[Draft], list[bytes]]

OPENING, FRAMES, LOGITS, COMMIT, ORDER = "opening", "frames", "logits", "commit", "order"
FOREIGN = b"\x5a" * 32  # a secret of some other handoff


@dataclass(frozen=True)
class Hostile:
    """One stream to refuse.

    Args:
        reasons: any of these is right; most faults have exactly one.
        differences: codes that the error must list.
    """

    name: str
    group: str
    reasons: tuple[str, ...]
    make: Make
    differences: tuple[str, ...] = ()

    @property
    def claims(self) -> bool:
        """The ticket is spent: the fault comes after a right opening."""
        return self.group != OPENING


def garbage() -> dict[str, bytes]:
    return {
        "an empty message": b"",
        "one byte": b"\x0a",
        "zeros": bytes(64),
        "a pickle": pickle.dumps({"planes": [1, 2]}, protocol=4),
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "a length that does not fit": b"\x12\xff\xff\xff\xff\x0f",
        "a varint without end": b"\x0a" + b"\xff" * 11,
        "two messages in one": pb.PushRequest(logits=pb.Logits(digest=bytes(32))).SerializeToString()
        + pb.PushRequest(commit=pb.Commit(digest=bytes(32))).SerializeToString(),
    }


def flip(data: bytes, bit: int) -> bytes:
    """One bit of `data` turned over; bit 0 is the lowest of the first byte."""
    at = bit // 8
    return data[:at] + bytes([data[at] ^ (1 << bit % 8)]) + data[at + 1 :]


def flip_first(data: bytes) -> bytes:
    return flip(data, 0)


def flip_middle(data: bytes) -> bytes:
    return flip(data, 8 * (len(data) // 2) + 3)


def changed(draft: Draft, place: int, change: Callable[[bytes], bytes]) -> list[bytes]:
    messages = draft.messages()
    messages[place] = change(messages[place])
    return messages


def field_bytes(number: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    length, size = len(body), b""
    while length >= 0x80:
        size += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + body
