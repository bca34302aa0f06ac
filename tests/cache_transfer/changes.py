"""What a hostile sender does to a stream made by hand, and what must come of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from cache_transfer.wire import identity_from_proto
from pdserve.errors import PdserveError
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.by_hand import Requests, keyed, make_frame, make_header, make_stream, push_bytes
from tests.cache_transfer.support import Pair, random_cache

TOKENS = 8
FRAMES = 12  # in a stream made by hand: three layers, K and V, two token ranges
Change = Callable[[Requests, bytes], list[bytes]]


def wire(requests: Requests) -> list[bytes]:
    return [request.SerializeToString() for request in requests]


def flipped(data: bytes, at: int = 5) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def rewrite_header(requests: Requests, _: bytes) -> list[bytes]:
    """The same header in another encoding: well-formed, but not the bytes that were hashed."""
    frame = requests[FRAMES].frame
    frame.header = frame.header.replace(b"\xa3seq\x0b", b"\xa3seq\xcc\x0b")
    return wire(requests)


def of_another_handoff(requests: Requests, _: bytes) -> list[bytes]:
    frame = requests[FRAMES].frame
    requests[FRAMES] = make_frame(b"x" * 32, frame.header, frame.payload)
    return wire(requests)


def flip_payload(plane: str) -> Change:
    def change(requests: Requests, _: bytes) -> list[bytes]:
        for request in requests[1:-2]:
            if msgpack.unpackb(request.frame.header)["plane"] == plane:
                request.frame.payload = flipped(request.frame.payload)
                return wire(requests)
        raise AssertionError(f"no frame of plane {plane}")

    return change


def flip_frame_digest(requests: Requests, _: bytes) -> list[bytes]:
    requests[FRAMES].frame.digest = flipped(requests[FRAMES].frame.digest)
    return wire(requests)


def flip_logits(requests: Requests, _: bytes) -> list[bytes]:
    requests[-2].logits.data = flipped(requests[-2].logits.data)
    return wire(requests)


def flip_manifest(requests: Requests, _: bytes) -> list[bytes]:
    requests[-1].commit.digest = flipped(requests[-1].commit.digest)
    return wire(requests)


def count_wrong(requests: Requests, _: bytes) -> list[bytes]:
    requests[-1].commit.frames += 1
    return wire(requests)


def swap(requests: Requests, _: bytes) -> list[bytes]:
    requests[1], requests[3] = requests[3], requests[1]
    return wire(requests)


def duplicate(requests: Requests, _: bytes) -> list[bytes]:
    return wire([*requests[:2], *requests[1:]])


def renumber(requests: Requests, secret: bytes) -> Requests:
    """Frames numbered and hashed again, and a commit that fits them: only coverage can tell."""
    frames: Requests = []
    for request in requests[1:-2]:
        header = msgpack.unpackb(request.frame.header)
        header["seq"] = len(frames)
        frames.append(make_frame(secret, msgpack.packb(header), request.frame.payload))
    commit = requests[-1].commit
    size = sum(len(request.frame.payload) for request in frames)
    digests = b"".join(request.frame.digest for request in frames) + requests[-2].logits.digest
    identity = requests[0].open.identity
    counts = struct.pack("<IQII", len(frames), size, commit.start, commit.end)
    digest = keyed(secret, b"pd-manif" + digests + identity_from_proto(identity).digest() + counts)
    last = pb.Commit(frames=len(frames), payload_bytes=size, start=commit.start, end=commit.end, digest=digest)
    return [requests[0], *frames, requests[-2], pb.PushRequest(commit=last)]


def duplicate_renumbered(requests: Requests, secret: bytes) -> list[bytes]:
    return wire(renumber([*requests[:2], *requests[1:]], secret))


def swap_renumbered(requests: Requests, secret: bytes) -> list[bytes]:
    """The second half of the tokens before the first."""
    requests[1], requests[2] = requests[2], requests[1]
    return wire(renumber(requests, secret))


def missing(requests: Requests, _: bytes) -> list[bytes]:
    return wire([*requests[:4], *requests[5:]])


def missing_renumbered(requests: Requests, secret: bytes) -> list[bytes]:
    return wire(renumber([*requests[:FRAMES], *requests[-2:]], secret))


def header_with(*, signed: bool = True, **changes: object) -> Change:
    """The first frame with other header fields; `signed`: hashed with the right key."""

    def change(requests: Requests, secret: bytes) -> list[bytes]:
        header = {**msgpack.unpackb(requests[1].frame.header), **changes}
        frame = make_frame(secret, make_header(**header), requests[1].frame.payload)
        if not signed:
            frame.frame.digest = requests[1].frame.digest
        requests[1] = frame
        return wire(requests)

    return change


def raw_header(data: bytes) -> Change:
    def change(requests: Requests, secret: bytes) -> list[bytes]:
        requests[1] = make_frame(secret, data, requests[1].frame.payload)
        return wire(requests)

    return change


def repeated_key(requests: Requests, secret: bytes) -> list[bytes]:
    """A map of six entries with `layer` twice and no `seq`."""
    header = msgpack.unpackb(requests[1].frame.header)
    del header["seq"]
    data = b"\x86" + msgpack.packb(header)[1:] + msgpack.packb("layer") + msgpack.packb(0)
    return raw_header(data)(requests, secret)


def short_payload(requests: Requests, secret: bytes) -> list[bytes]:
    frame = requests[1].frame
    requests[1] = make_frame(secret, frame.header, frame.payload[:-4])
    return wire(requests)


def logits_first(requests: Requests, _: bytes) -> list[bytes]:
    return wire([requests[0], requests[-2], *requests[1:-2], requests[-1]])


def second_opening(requests: Requests, _: bytes) -> list[bytes]:
    return wire([requests[0], *requests])


def commit_without_logits(requests: Requests, _: bytes) -> list[bytes]:
    return wire([*requests[:-2], requests[-1]])


def ends_early(requests: Requests, _: bytes) -> list[bytes]:
    return wire(requests[:-1])


def logits_with(name: str, change: Callable[[Any], object], *, signed: bool = True) -> Change:
    """Logits with another field; `signed`: hashed with the right key, as a sender that means it does."""

    def changed(requests: Requests, secret: bytes) -> list[bytes]:
        logits = requests[-2].logits
        setattr(logits, name, change(getattr(logits, name)))
        fields = struct.pack("<I", len(logits.dtype)) + logits.dtype.encode() + struct.pack("<I", logits.position)
        if signed:
            logits.digest = keyed(secret, b"pd-logit" + fields + logits.data)
        return wire(requests)

    return changed


def name_of(value: object) -> str | None:
    return getattr(value, "__qualname__", "").split(".")[0] or None


def open_stream(pair: Pair) -> tuple[Requests, bytes]:
    ticket, identity = pair.issue(TOKENS)
    return make_stream(ticket, identity, pair.sends, random_cache(pair.sends, TOKENS)), ticket.secret


async def check_refused(pair: Pair, messages: list[bytes], error: type[PdserveError], reason: str) -> None:
    with pytest.raises(error) as caught:
        await push_bytes(pair, messages)
    assert type(caught.value) is error
    assert (caught.value.reason, bool(caught.value.field)) == (reason, True)
    assert [(type(e), e.reason) for _, e in pair.host.failed] == [(error, reason)]
    assert pair.host.done == []
    await pair.check_next_handoff_works()


async def check_not_claimed(pair: Pair, messages: list[bytes], error: type[PdserveError], reason: str) -> PdserveError:
    with pytest.raises(error) as caught:
        await push_bytes(pair, messages)
    assert (type(caught.value), caught.value.reason) == (error, reason)
    assert not pair.host.asked.is_set()
    assert pair.host.failed == []
    return caught.value
