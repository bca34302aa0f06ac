"""Streams that must be refused: the reason, the host told once, no write after, the next one works."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest

from cache_transfer.contract import CachePlane
from cache_transfer.receiver import ReceiverSettings
from cache_transfer.wire import identity_from_proto
from pdserve.errors import Cancelled, DataLoss, Fenced, Incompatible, InvalidRequest, PdserveError, Refused
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.by_hand import (
    Requests,
    keyed,
    make_frame,
    make_header,
    make_stream,
    push_bytes,
    push_generated,
)
from tests.cache_transfer.support import Pair, check_same, make_pair, random_cache

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


def header_with(**changes: object) -> Change:
    """The first frame with other header fields, hashed with the right key."""

    def change(requests: Requests, secret: bytes) -> list[bytes]:
        header = {**msgpack.unpackb(requests[1].frame.header), **changes}
        requests[1] = make_frame(secret, make_header(**header), requests[1].frame.payload)
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


def logits_dtype(requests: Requests, _: bytes) -> list[bytes]:
    requests[-2].logits.dtype = "fp16"
    return wire(requests)


def logits_short(requests: Requests, _: bytes) -> list[bytes]:
    requests[-2].logits.data = requests[-2].logits.data[:-4]
    return wire(requests)


def logits_moved(requests: Requests, secret: bytes) -> list[bytes]:
    """Logits of another prompt position, hashed with the right key."""
    logits = requests[-2].logits
    logits.position -= 1
    fields = struct.pack("<I", len(logits.dtype)) + logits.dtype.encode() + struct.pack("<I", logits.position)
    logits.digest = keyed(secret, b"pd-logit" + fields + logits.data)
    return wire(requests)


AFTER_CLAIM: list[tuple[Change, type[PdserveError], str]] = [
    (rewrite_header, DataLoss, "FRAME_DIGEST"),
    (of_another_handoff, DataLoss, "FRAME_DIGEST"),
    (flip_payload("k"), DataLoss, "FRAME_DIGEST"),
    (flip_payload("v"), DataLoss, "FRAME_DIGEST"),
    (flip_frame_digest, DataLoss, "FRAME_DIGEST"),
    (flip_logits, DataLoss, "LOGITS_DIGEST"),
    (flip_manifest, DataLoss, "MANIFEST"),
    (count_wrong, DataLoss, "MANIFEST"),
    (swap, DataLoss, "FRAME_SEQUENCE"),
    (swap_renumbered, DataLoss, "FRAME_GAP"),
    (duplicate, DataLoss, "FRAME_SEQUENCE"),
    (duplicate_renumbered, DataLoss, "FRAME_OVERLAP"),
    (missing, DataLoss, "FRAME_SEQUENCE"),
    (missing_renumbered, DataLoss, "FRAMES_MISSING"),
    (header_with(tokens=[0, 2**31]), InvalidRequest, "FRAME_TOKENS"),
    (header_with(tokens=[0, 2**64 - 1]), InvalidRequest, "FRAME_HEADER"),
    (header_with(tokens=[4, 4]), InvalidRequest, "FRAME_HEADER"),
    (header_with(tokens=[0, 4, 8]), InvalidRequest, "FRAME_HEADER"),
    (header_with(tokens=[-1, 4]), InvalidRequest, "FRAME_HEADER"),
    (header_with(tokens=[False, True]), InvalidRequest, "FRAME_HEADER"),
    (header_with(tokens={"0": 4}), InvalidRequest, "FRAME_HEADER"),
    (header_with(heads=[0, 2**31]), InvalidRequest, "FRAME_HEADS"),
    (header_with(heads=[0, 2]), InvalidRequest, "FRAME_SIZE"),
    (header_with(layer=3), InvalidRequest, "FRAME_PLANE"),
    (header_with(layer=1.0), InvalidRequest, "FRAME_HEADER"),
    (header_with(plane="q"), InvalidRequest, "FRAME_PLANE"),
    (header_with(plane=b"k"), InvalidRequest, "FRAME_HEADER"),
    (header_with(dtype="fp16"), InvalidRequest, "FRAME_DTYPE"),
    (header_with(codec="zstd"), InvalidRequest, "FRAME_HEADER"),
    (header_with(plane="k" * 300), InvalidRequest, "FRAME_HEADER"),
    (repeated_key, InvalidRequest, "FRAME_HEADER"),
    (raw_header(pickle.dumps({"plane": "k"})), InvalidRequest, "FRAME_HEADER"),
    (raw_header(msgpack.packb([1, 2])), InvalidRequest, "FRAME_HEADER"),
    (raw_header(b"\x91" * 200), InvalidRequest, "FRAME_HEADER"),
    (raw_header(msgpack.packb({"plane": "k"})[:-1]), InvalidRequest, "FRAME_HEADER"),
    (short_payload, InvalidRequest, "FRAME_SIZE"),
    (logits_first, InvalidRequest, "MESSAGE_ORDER"),
    (second_opening, InvalidRequest, "MESSAGE_ORDER"),
    (commit_without_logits, InvalidRequest, "MESSAGE_ORDER"),
    (ends_early, Cancelled, "SENDER_GONE"),
    (logits_dtype, InvalidRequest, "LOGITS_DTYPE"),
    (logits_short, InvalidRequest, "LOGITS_SIZE"),
    (logits_moved, InvalidRequest, "LOGITS_POSITION"),
]

MALFORMED = [
    pickle.dumps({"a": 1}),
    b"",
    b"\x12\xff\xff\xff\xff\x7f" + b"x" * 20,
    b"\x2a\x00",
]


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


async def test_the_stream_made_by_hand_is_taken() -> None:
    """Without a change the same messages pass, also through the plain generated stub."""
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        grant, ack = await push_generated(pair, requests)
        assert (grant.grant.start, grant.grant.end, grant.grant.max_payload_bytes) == (0, TOKENS, 1 << 20)
        assert (ack.ack.frames, ack.ack.payload_bytes) == (FRAMES, 6 * TOKENS * 3 * 4 * 4)
        requests, secret = open_stream(pair)
        await push_bytes(pair, wire(renumber(requests, secret)))
        for sink in pair.host.sinks.values():
            check_same(sink.content(TOKENS), random_cache(pair.sends, TOKENS))
        pair.check_nothing_left()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize(("change", "error", "reason"), AFTER_CLAIM, ids=name_of)
async def test_a_bad_stream_is_refused(kind: str, change: Change, error: type[PdserveError], reason: str) -> None:
    async with make_pair(kind) as pair:
        await check_refused(pair, change(*open_stream(pair)), error, reason)


@pytest.mark.parametrize("data", MALFORMED)
async def test_foreign_bytes_are_refused(data: bytes) -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        messages = [requests[0].SerializeToString(), data]
        await check_refused(pair, messages, InvalidRequest, "MALFORMED_MESSAGE")


async def test_a_logits_only_handoff_takes_no_frame() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS, logits_only=True)
        requests = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, TOKENS))
        requests[0].open.logits_only = True
        await check_refused(pair, wire(requests), InvalidRequest, "FRAME_TOKENS")


async def test_tokens_already_held_are_refused() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS, start=4)
        requests = make_stream(ticket, replace(identity, start=0), pair.sends, random_cache(pair.sends, TOKENS))
        opening = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, TOKENS))[0]
        await check_refused(pair, wire([opening, *requests[1:]]), InvalidRequest, "FRAME_TOKENS")


async def test_a_frame_above_the_granted_size_is_refused() -> None:
    async with make_pair("grpc", settings=ReceiverSettings(max_payload_bytes=100)) as pair:
        requests, _ = open_stream(pair)
        await check_refused(pair, wire(requests), InvalidRequest, "FRAME_SIZE")


# Before the claim: the ticket stays, the host hears nothing.


async def check_not_claimed(pair: Pair, messages: list[bytes], error: type[PdserveError], reason: str) -> PdserveError:
    with pytest.raises(error) as caught:
        await push_bytes(pair, messages)
    assert (type(caught.value), caught.value.reason) == (error, reason)
    assert not pair.host.asked.is_set()
    assert pair.host.failed == []
    return caught.value


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_ticket_is_claimed_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        await push_bytes(pair, wire(requests))
        with pytest.raises(Fenced) as caught:
            await push_bytes(pair, wire(requests))
        assert caught.value.reason == "TICKET_USED"
        assert (len(pair.host.done), pair.host.failed) == (1, [])
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_stale_attempt_is_fenced(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        pair.book.reissue(requests[0].open.handoff_id)
        await check_not_claimed(pair, wire(requests), Fenced, "ATTEMPT_STALE")
        requests[0].open.attempt = 3
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_UNKNOWN")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_another_start_of_the_worker_is_fenced(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        requests[0].open.incarnation = b"j" * 16
        await check_not_claimed(pair, wire(requests), Fenced, "INCARNATION")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_an_expired_or_closed_ticket_is_refused(kind: str) -> None:
    async with make_pair(kind) as pair:
        requests, _ = open_stream(pair)
        pair.clock.now += 30.0
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_EXPIRED")
        pair.book.close(requests[0].open.handoff_id)
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_UNKNOWN")
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", "other"), ("prompt_digest", b"q" * 32), ("adapter_digest", b"a" * 32), ("end", 9), ("start", 1)],
)
async def test_another_identity_is_refused_by_field(kind: str, field: str, value: object) -> None:
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(TOKENS)
        changed = replace(identity, **{field: value})  # type: ignore[arg-type]
        requests = make_stream(ticket, changed, pair.sends, random_cache(pair.sends, 9))
        error = await check_not_claimed(pair, wire(requests), Incompatible, "IDENTITY_MISMATCH")
        assert [d.code for d in error.differences] == [f"IDENTITY.{field}"]
        await pair.check_next_handoff_works()


async def test_an_identity_without_proof_is_refused() -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        requests[0].open.identity.tenant = "other"
        await check_not_claimed(pair, wire(requests), DataLoss, "PROOF")
        await pair.check_next_handoff_works()


async def test_another_contract_is_refused_by_field() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(TOKENS)
        planes = (*pair.sends.planes[:2], (CachePlane("k", 3, 4), CachePlane("v", 3, 8)))
        other = replace(pair.sends, planes=planes, vocab_size=12)
        requests = make_stream(ticket, identity, other, random_cache(other, TOKENS))
        error = await check_not_claimed(pair, wire(requests), Incompatible, "CONTRACT_MISMATCH")
        codes = [d.code for d in error.differences]
        assert codes == ["PLANES[2].v.head_dim", "VOCAB_SIZE"]
        await pair.check_next_handoff_works()


@pytest.mark.parametrize(
    ("field", "value", "error", "reason"),
    [
        ("integrity", "crc32", InvalidRequest, "INTEGRITY"),
        ("integrity", "", InvalidRequest, "INTEGRITY"),
        ("kv_dtype", "fp16", Incompatible, "KV_DTYPE"),
        ("logits_only", True, InvalidRequest, "LOGITS_ONLY"),
        ("proof", b"", InvalidRequest, "MALFORMED_MESSAGE"),
        ("handoff_id", b"", Refused, "TICKET_UNKNOWN"),
    ],
)
async def test_an_opening_that_does_not_fit_is_refused(
    field: str, value: object, error: type[PdserveError], reason: str
) -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        setattr(requests[0].open, field, value)
        await check_not_claimed(pair, wire(requests), error, reason)
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("missing_field", ["identity", "contract"])
async def test_an_opening_must_be_complete(missing_field: str) -> None:
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        requests[0].open.ClearField(missing_field)
        await check_not_claimed(pair, wire(requests), InvalidRequest, "MALFORMED_MESSAGE")
        await pair.check_next_handoff_works()


async def test_refusals_are_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async with make_pair("memory") as pair:
        requests, secret = open_stream(pair)
        pair.clock.now += 30.0
        await check_not_claimed(pair, wire(requests), Refused, "TICKET_EXPIRED")
        assert "TICKET_EXPIRED" in caplog.text
        assert requests[0].open.handoff_id.hex() in caplog.text
        for text in (secret.hex(), repr(secret), requests[0].open.proof.hex()):
            assert text not in caplog.text
