"""PushRequest and PushResponse: bytes <-> messages.

Frames carry nearly all bytes, so they are done by hand: filled in place on the way out
(framing.py), views of the received message on the way in. The bytes are plain protobuf; the
generated classes read and write the same. All other messages go through the generated classes.

Strict where hand-made: a frame has its three fields, in order, and nothing else.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from cache_transfer.digests import DIGEST_BYTES
from cache_transfer.messages import (
    MAX_FRAMES,
    Ack,
    Commit,
    Frame,
    Frames,
    Grant,
    Logits,
    Outgoing,
    PackedFrames,
    PushOpening,
    Queued,
    Release,
    Request,
    Response,
    SharedFrame,
    SharedFrames,
    SharedMemory,
)
from cache_transfer.wire import (
    contract_from_proto,
    contract_to_proto,
    identity_from_proto,
    identity_to_proto,
    known_contract,
)
from pdserve.errors import InvalidRequest
from pdserve.v1 import transfer_pb2 as pb

# A protobuf tag is (field number << 3) | wire type; all fields here are length-delimited (2).
_FRAME_TAG, _FRAMES_TAG = 2 << 3 | 2, 6 << 3 | 2
_ONE_OF_FRAMES_TAG = 1 << 3 | 2
_FIELD_TAGS = (1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2)  # Frame.header, payload, digest
_ONEOF = {
    number << 3 | 2: name for number, name in ((1, "open"), (3, "logits"), (4, "commit"), (5, "shared"), (7, "queued"))
}
_MAX_VARINT_BYTES = 5
_SMALL_BYTES = 64 << 10  # the contract of a larger opening is read anew each time


def decode_frame(data: bytes) -> Frame:
    """The bytes of PushRequest{frame}, without copying: header and payload are views of `data`.

    Raises InvalidRequest (MALFORMED_MESSAGE).
    """
    return _frame(_whole(memoryview(data), _FRAME_TAG))


def decode_frames(data: bytes) -> Frames:
    """The bytes of PushRequest{frames}, as `decode_frame`."""
    view, at = _whole(memoryview(data), _FRAMES_TAG), 0
    found: list[Frame] = []
    while at < len(view) and len(found) < MAX_FRAMES:
        size, at = _length(view, at, _ONE_OF_FRAMES_TAG)
        found.append(_frame(view[at : at + size]))
        at += size
    if at != len(view) or not found:
        raise _malformed(f"not 1 to {MAX_FRAMES} frames in {len(view)} bytes")
    return Frames(tuple(found))


def _whole(view: memoryview, tag: int) -> memoryview:
    """The body of a message that has this one field and nothing else."""
    length, at = _length(view, 0, tag)
    if at + length != len(view):
        raise _malformed(f"a field of {length} bytes in a message of {len(view)}")
    return view[at:]


def _frame(view: memoryview) -> Frame:
    parts, at = [], 0
    for tag in _FIELD_TAGS:
        size, at = _length(view, at, tag)
        parts.append(view[at : at + size])
        at += size
    if at != len(view):
        raise _malformed("a frame with more than its three fields")
    header, payload, digest = parts
    return Frame(header, payload, _digest("frame", bytes(digest)))


def encode_request(message: Outgoing) -> bytes:
    match message:
        case PackedFrames(data=bytes() as data):
            return data
        case PackedFrames(data=SharedFrames() as shared):
            frames = pb.SharedFrames(frames=[_shared_frame_to_proto(each) for each in shared.frames])
            return pb.PushRequest(shared=frames).SerializeToString()
        case PushOpening():
            return pb.PushRequest(open=_opening_to_proto(message)).SerializeToString()
        case Queued():
            return pb.PushRequest(queued=pb.Queued(frames=message.frames)).SerializeToString()
        case Logits():
            logits = pb.Logits(dtype=message.dtype, data=message.data, position=message.position, digest=message.digest)
            return pb.PushRequest(logits=logits).SerializeToString()
        case Commit():
            commit = pb.Commit(
                frames=message.frames,
                payload_bytes=message.payload_bytes,
                start=message.start,
                end=message.end,
                digest=message.digest,
            )
            return pb.PushRequest(commit=commit).SerializeToString()
        case _:
            raise TypeError(f"{type(message).__name__} was packed for another transport")


def decode_request(data: bytes) -> Request:
    """Raises InvalidRequest: MALFORMED_MESSAGE, MALFORMED_CONTRACT, MALFORMED_IDENTITY."""
    if data[:1] == bytes([_FRAME_TAG]):
        return decode_frame(data)
    if data[:1] == bytes([_FRAMES_TAG]):
        return decode_frames(data)
    name = _ONEOF.get(data[0]) if data else None
    if name is None:
        raise _malformed("neither open, frame, frames, logits, commit, shared nor queued")
    try:
        request = pb.PushRequest.FromString(data)
    except DecodeError:
        raise _malformed(f"{name} is not protobuf") from None
    if request.WhichOneof("message") != name:
        raise _malformed(f"{name} and another message in one")
    if request.HasField("open"):
        return _opening_from_proto(request.open, small=len(data) <= _SMALL_BYTES)
    if request.HasField("shared"):
        return _shared_from_proto(request.shared)
    if request.HasField("queued"):
        return Queued(request.queued.frames)
    if request.HasField("logits"):
        logits = request.logits
        return Logits(logits.dtype, logits.data, logits.position, _digest("logits", logits.digest))
    commit = request.commit
    return Commit(commit.frames, commit.payload_bytes, commit.start, commit.end, _digest("commit", commit.digest))


def encode_response(message: Response) -> bytes:
    if isinstance(message, Grant):
        grant = pb.Grant(
            start=message.start,
            end=message.end,
            max_payload_bytes=message.max_payload_bytes,
            shared=message.shared,
            max_frames=message.max_frames,
            queue=message.queue,
        )
        return pb.PushResponse(grant=grant).SerializeToString()
    if isinstance(message, Release):
        return pb.PushResponse(release=pb.Release(frames=message.frames)).SerializeToString()
    ack = pb.Ack(frames=message.frames, payload_bytes=message.payload_bytes)
    return pb.PushResponse(ack=ack).SerializeToString()


def decode_response(data: bytes) -> Response:
    """Raises InvalidRequest (MALFORMED_MESSAGE)."""
    try:
        response = pb.PushResponse.FromString(data)
    except DecodeError:
        raise _malformed("the answer is not protobuf") from None
    if response.HasField("grant"):
        grant = response.grant
        together = max(1, grant.max_frames)
        return Grant(grant.start, grant.end, grant.max_payload_bytes, grant.shared, together, grant.queue)
    if response.HasField("release"):
        return Release(response.release.frames)
    if response.HasField("ack"):
        return Ack(response.ack.frames, response.ack.payload_bytes)
    raise _malformed("the answer is neither grant, release nor ack")


def _opening_to_proto(opening: PushOpening) -> pb.PushOpen:
    return pb.PushOpen(
        handoff_id=opening.handoff_id,
        attempt=opening.attempt,
        incarnation=opening.incarnation,
        proof=opening.proof,
        identity=identity_to_proto(opening.identity),
        contract=contract_to_proto(opening.contract),
        kv_dtype=opening.kv_dtype,
        logits_only=opening.logits_only,
        integrity=opening.integrity,
        shared=None if opening.shared is None else pb.SharedMemory(**vars(opening.shared)),
    )


def _opening_from_proto(proto: pb.PushOpen, *, small: bool) -> PushOpening:
    for name in ("identity", "contract"):
        if not proto.HasField(name):
            raise _malformed(f"open without {name}")
    return PushOpening(
        handoff_id=proto.handoff_id,
        attempt=proto.attempt,
        incarnation=proto.incarnation,
        proof=_digest("open", proto.proof),
        identity=identity_from_proto(proto.identity),
        contract=(known_contract if small else contract_from_proto)(proto.contract),
        kv_dtype=proto.kv_dtype,
        logits_only=proto.logits_only,
        integrity=proto.integrity,
        shared=_memory_from_proto(proto.shared) if proto.HasField("shared") else None,
    )


def _memory_from_proto(proto: pb.SharedMemory) -> SharedMemory:
    return SharedMemory(proto.pid, proto.fd, proto.size, proto.entries)


def encode_shared_frame(frame: SharedFrame) -> bytes:
    """The bytes of one SharedFrame, as a queue in shared memory holds them."""
    return _shared_frame_to_proto(frame).SerializeToString()


def decode_shared_frame(data: bytes) -> SharedFrame:
    """Raises InvalidRequest (MALFORMED_MESSAGE)."""
    try:
        return _shared_frame_from_proto(pb.SharedFrame.FromString(data))
    except DecodeError:
        raise _malformed("an entry of the queue is not protobuf") from None


def _shared_frame_to_proto(frame: SharedFrame) -> pb.SharedFrame:
    return pb.SharedFrame(header=frame.header, offset=frame.offset, size=frame.size, digest=frame.digest)


def _shared_frame_from_proto(proto: pb.SharedFrame) -> SharedFrame:
    return SharedFrame(proto.header, proto.offset, proto.size, _digest("shared", proto.digest))


def _shared_from_proto(proto: pb.SharedFrames) -> SharedFrames:
    if not proto.frames:
        raise _malformed("shared without frames")
    return SharedFrames(tuple(_shared_frame_from_proto(each) for each in proto.frames))


def _digest(name: str, value: bytes) -> bytes:
    if len(value) != DIGEST_BYTES:
        raise _malformed(f"the digest of {name} has {len(value)} bytes, not {DIGEST_BYTES}")
    return value


def _length(view: memoryview, at: int, tag: int) -> tuple[int, int]:
    """Reads the expected tag and a length at `at`; returns the length and where the body starts."""
    if at >= len(view) or view[at] != tag:
        raise _malformed(f"field tag {tag} is due at byte {at}")
    length = shift = 0
    for position in range(at + 1, min(at + 1 + _MAX_VARINT_BYTES, len(view))):
        byte = view[position]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if position + 1 + length > len(view):
                raise _malformed(f"a field of {length} bytes does not fit")
            return length, position + 1
    raise _malformed(f"no length at byte {at + 1}")


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"not a message of this protocol: {problem}",
        reason="MALFORMED_MESSAGE",
        field="message",
        remedy="send what docs/protocol.md describes",
    )
