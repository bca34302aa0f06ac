"""The hand-made encoding of frames against the generated protobuf classes, both ways."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_transfer.digests import frame_digest
from cache_transfer.framing import FrameBuffer
from cache_transfer.messages import MAX_FRAMES, Ack, Commit, Frame, Frames, Grant, Logits, Unpacked
from cache_transfer.opening import make_opening
from cache_transfer.push import decode_frame, decode_request, decode_response, encode_request, encode_response
from pdserve.errors import Internal, InvalidRequest
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.support import make_pair

DIGEST = b"d" * 32
# Sizes on both sides of every change in the length of a varint up to three bytes.
sizes = st.sampled_from([1, 40, 41, 83, 84, 85, 127, 128, 16_300, 16_383, 16_384, 1 << 20])


def encode_frame(header: bytes, payload: bytes, digest: bytes = DIGEST) -> bytes:
    buffer = FrameBuffer([(header, len(payload))])
    buffer.payloads[0][:] = payload
    return buffer.seal([digest])


@given(st.binary(min_size=1, max_size=200), sizes)
def test_our_frames_are_the_generated_ones(header: bytes, size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    request = pb.PushRequest(frame=pb.Frame(header=header, payload=payload, digest=DIGEST))
    ours = encode_frame(header, payload)
    assert ours == request.SerializeToString()
    assert pb.PushRequest.FromString(ours) == request
    frame = decode_request(request.SerializeToString())
    assert isinstance(frame, Frame)
    assert (bytes(frame.header), bytes(frame.payload), frame.digest) == (header, payload, DIGEST)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), sizes), min_size=2, max_size=4))
def test_our_messages_of_several_frames_are_the_generated_ones(frames: list[tuple[bytes, int]]) -> None:
    buffer = FrameBuffer(frames)
    for payload in buffer.payloads:
        payload[:] = bytes(i % 251 for i in range(len(payload)))
    ours = buffer.seal([DIGEST] * len(frames))
    made = [pb.Frame(header=h, payload=bytes(i % 251 for i in range(n)), digest=DIGEST) for h, n in frames]
    assert ours == pb.PushRequest(frames=pb.Frames(frames=made)).SerializeToString()
    read = decode_request(ours)
    assert isinstance(read, Frames)
    assert [(bytes(f.header), bytes(f.payload), f.digest) for f in read.frames] == [
        (f.header, f.payload, f.digest) for f in made
    ]
    assert all(frame.payload.obj is ours for frame in read.frames)


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 1])
def test_a_message_of_no_or_too_many_frames_is_refused(count: int) -> None:
    frame = pb.Frame(header=b"header", payload=b"payload", digest=DIGEST)
    with pytest.raises(InvalidRequest):
        decode_request(pb.PushRequest(frames=pb.Frames(frames=[frame] * count)).SerializeToString())


def test_a_received_frame_is_not_copied() -> None:
    data = encode_frame(b"header", b"payload")
    frame = decode_frame(data)
    assert frame.payload.obj is data
    assert frame.header.obj is data


def test_a_sealed_frame_can_no_longer_be_written() -> None:
    buffer = FrameBuffer([(b"header", 4)])
    [view] = buffer.payloads
    view[:] = b"abcd"
    buffer.seal([DIGEST])
    with pytest.raises(ValueError, match="released"):
        view[0] = 0


def test_memory_kept_by_a_source_stays_valid() -> None:
    buffer = FrameBuffer([(b"header", 4)])
    kept = np.frombuffer(buffer.payloads[0], np.uint8)
    buffer.payloads[0][:] = b"abcd"
    data = buffer.seal([DIGEST])
    before = sys.getrefcount(data)
    assert kept.tobytes() == b"abcd"
    del kept, buffer
    assert sys.getrefcount(data) == before - 2  # the buffer's own, and the view's


@given(st.data())
def test_a_cut_frame_is_refused(data: st.DataObject) -> None:
    whole = encode_frame(b"header", b"payload")
    with pytest.raises(InvalidRequest):
        decode_request(whole[: data.draw(st.integers(0, len(whole) - 1))])


HEADER, PAYLOAD, END = b"\x0a\x01h", b"\x12\x01p", b"\x1a\x20" + DIGEST


def wrapped(body: bytes) -> bytes:
    return b"\x12" + bytes([len(body)]) + body


@pytest.mark.parametrize(
    "data",
    [
        wrapped(PAYLOAD + HEADER + END),
        wrapped(HEADER + END),
        wrapped(HEADER + PAYLOAD),
        wrapped(HEADER + PAYLOAD + END + b"\x22\x01x"),
        wrapped(b"\x22\x01x" + HEADER + PAYLOAD + END),
        wrapped(HEADER + PAYLOAD + b"\x1a\x1f" + DIGEST[:-1]),
        wrapped(HEADER + b"\x10\x01" + END),
        wrapped(HEADER + PAYLOAD + END) + b"\x1a\x00",
        b"\x12\xff" + HEADER + PAYLOAD + END,
        b"\x12\xff\xff\xff\xff\xff\x01" + HEADER + PAYLOAD + END,
        b"\x12\x80\x80",
        wrapped(HEADER + b"\x12\xff\xff\xff\x7fp" + END),
        b"\x1a\x05abc",
        b"\x0a\x00" + wrapped(HEADER + PAYLOAD + END),
        b"\x08\x01",
        b"",
    ],
    ids=[
        "order",
        "no payload",
        "no digest",
        "unknown field last",
        "unknown field first",
        "short digest",
        "payload is a number",
        "another message behind",
        "length beyond the end",
        "length of six bytes",
        "length cut",
        "payload beyond the end",
        "not protobuf",
        "two messages",
        "unknown message",
        "nothing",
    ],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(data)
    assert caught.value.reason == "MALFORMED_MESSAGE"


@given(st.binary(max_size=100))
def test_random_bytes_never_crash(data: bytes) -> None:
    """Neither as they are, nor where lengths lead to them: behind a message's tag, in a frame, in one of several."""
    begun = wrapped(HEADER + data)
    for sent in (data, *(tag + data for tag in (b"\x12", b"\x0a", b"\x1a", b"\x32")), wrapped(data), begun):
        for request in (sent, b"\x32" + bytes([len(sent)]) + sent, b"\x32" + wrapped(sent)[1:] + data):
            with suppress(InvalidRequest):
                decode_request(request)


async def test_other_messages_survive_the_wire() -> None:
    async with make_pair("memory") as pair:
        ticket, identity = pair.issue(9)
        opening = make_opening(ticket, identity, pair.sends, logits_only=False)
        assert decode_request(encode_request(opening)) == opening
        logits = Logits("fp32", b"data", 8, DIGEST)
        assert decode_request(encode_request(logits)) == logits
        commit = Commit(3, 1 << 40, 4, 9, DIGEST)
        assert decode_request(encode_request(commit)) == commit
        for answer in (Grant(4, 9, 1 << 20), Ack(3, 1 << 40)):
            assert decode_response(encode_response(answer)) == answer


@pytest.mark.parametrize("data", [b"", b"\x80\x04}", b"\x0a\x05abc"])
def test_foreign_answers_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_response(data)


@pytest.mark.parametrize("count", [1, 2, MAX_FRAMES])
async def test_both_transports_pack_the_same_frames(count: int) -> None:
    def fill(out: memoryview) -> None:
        out[:] = b"payload"

    async with make_pair("memory") as memory, make_pair("grpc") as network:
        frames = [Unpacked(b"header", 7, fill)] * count
        left = memory.transport.pack(frames, b"s" * 32)
        right = network.transport.pack(frames, b"s" * 32)
        assert left.frames == right.frames == ((frame_digest(b"s" * 32, b"header", b"payload"), 7),) * count
        assert isinstance(left.data, Frame if count == 1 else Frames)
        assert isinstance(right.data, bytes)
        assert decode_request(right.data) == left.data
        with pytest.raises(TypeError):
            encode_request(left)
        stream = memory.transport.open(1.0)
        with pytest.raises(Internal):
            await stream.send(right)
        await stream.close()
