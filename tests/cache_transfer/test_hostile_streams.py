"""Streams that must be refused: the reason, the host told once, no write after, the next one works."""

from __future__ import annotations

import pickle
from dataclasses import replace

import msgpack
import pytest

from cache_transfer.receiver import ReceiverSettings
from pdserve.errors import Cancelled, DataLoss, InvalidRequest, PdserveError
from tests.cache_transfer import changes as c
from tests.cache_transfer.by_hand import Requests, make_frame, make_stream, push_bytes, push_generated
from tests.cache_transfer.changes import Change, check_refused, header_with, open_stream, raw_header, renumber, wire
from tests.cache_transfer.support import check_same, make_pair, random_cache


def pickled_payload(requests: Requests, secret: bytes) -> list[bytes]:
    """A pickle where the tensor belongs, hashed with the right key."""
    payload = pickle.dumps({"k": [1.0] * 4})
    requests[1] = make_frame(secret, requests[1].frame.header, payload)
    return wire(requests)


AFTER_CLAIM: list[tuple[Change, type[PdserveError], str]] = [
    (c.rewrite_header, DataLoss, "FRAME_DIGEST"),
    (c.of_another_handoff, DataLoss, "FRAME_DIGEST"),
    (c.flip_payload("k"), DataLoss, "FRAME_DIGEST"),
    (c.flip_payload("v"), DataLoss, "FRAME_DIGEST"),
    (c.flip_frame_digest, DataLoss, "FRAME_DIGEST"),
    (c.flip_logits, DataLoss, "LOGITS_DIGEST"),
    (c.flip_manifest, DataLoss, "MANIFEST"),
    (c.count_wrong, DataLoss, "MANIFEST"),
    (c.swap, DataLoss, "FRAME_SEQUENCE"),
    (c.swap_renumbered, DataLoss, "FRAME_GAP"),
    (c.duplicate, DataLoss, "FRAME_SEQUENCE"),
    (c.duplicate_renumbered, DataLoss, "FRAME_OVERLAP"),
    (c.missing, DataLoss, "FRAME_SEQUENCE"),
    (c.missing_renumbered, DataLoss, "FRAMES_MISSING"),
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
    (c.repeated_key, InvalidRequest, "FRAME_HEADER"),
    (raw_header(pickle.dumps({"plane": "k"})), InvalidRequest, "FRAME_HEADER"),
    (pickled_payload, InvalidRequest, "FRAME_SIZE"),
    (raw_header(msgpack.packb([1, 2])), InvalidRequest, "FRAME_HEADER"),
    (raw_header(b"\x91" * 200), InvalidRequest, "FRAME_HEADER"),
    (raw_header(msgpack.packb({"plane": "k"})[:-1]), InvalidRequest, "FRAME_HEADER"),
    (c.short_payload, InvalidRequest, "FRAME_SIZE"),
    (c.logits_first, InvalidRequest, "MESSAGE_ORDER"),
    (c.second_opening, InvalidRequest, "MESSAGE_ORDER"),
    (c.commit_without_logits, InvalidRequest, "MESSAGE_ORDER"),
    (c.ends_early, Cancelled, "SENDER_GONE"),
    (c.logits_with("dtype", lambda _: "fp16"), InvalidRequest, "LOGITS_DTYPE"),
    (c.logits_with("data", lambda data: data[:-4]), InvalidRequest, "LOGITS_SIZE"),
    (c.logits_with("position", lambda position: position - 1), InvalidRequest, "LOGITS_POSITION"),
    (c.logits_with("dtype", lambda _: "fp16", signed=False), DataLoss, "LOGITS_DIGEST"),
    (c.logits_with("data", lambda data: data[:-4], signed=False), DataLoss, "LOGITS_DIGEST"),
    (c.logits_with("position", lambda position: position - 1, signed=False), DataLoss, "LOGITS_DIGEST"),
    (header_with(layer=3, signed=False), DataLoss, "FRAME_DIGEST"),
    (header_with(codec="zstd", signed=False), DataLoss, "FRAME_DIGEST"),
]

MALFORMED = [
    pickle.dumps({"a": 1}),
    b"",
    b"\x12\xff\xff\xff\xff\x7f" + b"x" * 20,
    b"\x2a\x00",
]


async def test_the_stream_made_by_hand_is_taken() -> None:
    """Without a change the same messages pass, also through the plain generated stub."""
    async with make_pair("grpc") as pair:
        requests, _ = open_stream(pair)
        grant, ack = await push_generated(pair, requests)
        assert (grant.grant.start, grant.grant.end, grant.grant.max_payload_bytes) == (0, c.TOKENS, 1 << 20)
        assert (ack.ack.frames, ack.ack.payload_bytes) == (c.FRAMES, 6 * c.TOKENS * 3 * 4 * 4)
        requests, secret = open_stream(pair)
        await push_bytes(pair, wire(renumber(requests, secret)))
        for sink in pair.host.sinks.values():
            check_same(sink.content(c.TOKENS), random_cache(pair.sends, c.TOKENS))
        pair.check_nothing_left()


@pytest.mark.parametrize("kind", ["grpc", "memory"])
@pytest.mark.parametrize(("change", "error", "reason"), AFTER_CLAIM, ids=c.name_of)
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
        ticket, identity = pair.issue(c.TOKENS, logits_only=True)
        requests = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, c.TOKENS))
        requests[0].open.logits_only = True
        await check_refused(pair, wire(requests), InvalidRequest, "FRAME_TOKENS")


async def test_tokens_already_held_are_refused() -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(c.TOKENS, start=4)
        requests = make_stream(ticket, replace(identity, start=0), pair.sends, random_cache(pair.sends, c.TOKENS))
        opening = make_stream(ticket, identity, pair.sends, random_cache(pair.sends, c.TOKENS))[0]
        await check_refused(pair, wire([opening, *requests[1:]]), InvalidRequest, "FRAME_TOKENS")


async def test_a_frame_above_the_granted_size_is_refused() -> None:
    async with make_pair("grpc", settings=ReceiverSettings(max_payload_bytes=100)) as pair:
        requests, _ = open_stream(pair)
        await check_refused(pair, wire(requests), InvalidRequest, "FRAME_SIZE")


@pytest.mark.parametrize("at", [1, c.FRAMES // 2, c.FRAMES])
@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_a_frame_of_an_earlier_attempt_is_refused(kind: str, at: int) -> None:
    """Same handoff, same cache, same place in the stream, and once valid: but signed for another attempt."""
    async with make_pair(kind) as pair:
        ticket, identity = pair.issue(c.TOKENS)
        cache = random_cache(pair.sends, c.TOKENS)
        old = make_stream(ticket, identity, pair.sends, cache)
        new = make_stream(pair.book.reissue(ticket.handoff_id), identity, pair.sends, cache)
        assert old[at].frame.header == new[at].frame.header and old[at].frame.payload == new[at].frame.payload
        new[at] = old[at]
        await check_refused(pair, wire(new), DataLoss, "FRAME_DIGEST")


@pytest.mark.parametrize(("at", "reason"), [(-2, "LOGITS_DIGEST"), (-1, "MANIFEST")])
async def test_logits_and_commit_of_an_earlier_attempt_are_refused(at: int, reason: str) -> None:
    async with make_pair("grpc") as pair:
        ticket, identity = pair.issue(c.TOKENS)
        cache = random_cache(pair.sends, c.TOKENS)
        old = make_stream(ticket, identity, pair.sends, cache)
        new = make_stream(pair.book.reissue(ticket.handoff_id), identity, pair.sends, cache)
        new[at] = old[at]
        await check_refused(pair, wire(new), DataLoss, reason)
