"""A sender written from docs/protocol.md with generated classes, msgpack and blake3 alone.

It shares no code with our codec, so it also checks that the document says what the code does.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
import msgpack
from blake3 import blake3

from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.encoding import encode
from cache_transfer.messages import Frame, Frames, Outgoing, PackedFrames, SharedFrames
from cache_transfer.push import decode_request
from cache_transfer.transport import PUSH_METHOD
from cache_transfer.wire import contract_to_proto, identity_to_proto
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import transfer_pb2 as pb
from pdserve.v1 import transfer_pb2_grpc
from tests.cache_transfer.pages import WAIT_S, Array
from tests.cache_transfer.support import Pair, logits_of

Requests = list[pb.PushRequest]
T = TypeVar("T")


def keyed(secret: bytes, data: bytes) -> bytes:
    return blake3(data, key=secret).digest()


def make_open(ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract) -> pb.PushRequest:
    return pb.PushRequest(
        open=pb.PushOpen(
            handoff_id=ticket.handoff_id,
            attempt=ticket.attempt,
            incarnation=ticket.incarnation,
            proof=keyed(ticket.secret, b"pd-proof" + encode(identity)),
            identity=identity_to_proto(identity),
            contract=contract_to_proto(contract),
            kv_dtype=contract.kv_dtype,
            integrity="blake3-keyed",
        )
    )


def make_header(**fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def make_frame(secret: bytes, header: bytes, payload: bytes) -> pb.PushRequest:
    digest = keyed(secret, b"pd-frame" + struct.pack("<I", len(header)) + header + payload)
    return pb.PushRequest(frame=pb.Frame(header=header, payload=payload, digest=digest))


def make_frames(
    ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract, cache: dict[tuple[str, int], Array]
) -> Requests:
    """Two frames per plane and layer: the first half of the tokens, then the rest."""
    half = (identity.start + identity.end) // 2
    frames: Requests = []
    for layer, planes in enumerate(contract.planes):
        for plane in planes:
            for t0, t1 in ((identity.start, half), (half, identity.end)):
                header = make_header(
                    plane=plane.name,
                    layer=layer,
                    heads=[0, plane.heads],
                    tokens=[t0, t1],
                    seq=len(frames),
                    dtype=contract.kv_dtype,
                )
                frames.append(make_frame(ticket.secret, header, cache[plane.name, layer][t0:t1].tobytes()))
    return frames


def make_logits(ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract) -> pb.PushRequest:
    dtype, data = logits_of(contract)
    position = identity.end - 1
    fields = struct.pack("<I", len(dtype)) + dtype.encode() + struct.pack("<I", position)
    digest = keyed(ticket.secret, b"pd-logit" + fields + data)
    return pb.PushRequest(logits=pb.Logits(dtype=dtype, data=data, position=position, digest=digest))


def make_commit(ticket: Ticket, identity: HandoffIdentity, frames: Requests, logits: pb.PushRequest) -> pb.PushRequest:
    size = sum(len(request.frame.payload) for request in frames)
    digests = b"".join(request.frame.digest for request in frames) + logits.logits.digest
    counts = struct.pack("<IQII", len(frames), size, identity.start, identity.end)
    digest = keyed(ticket.secret, b"pd-manif" + digests + identity.digest() + counts)
    commit = pb.Commit(frames=len(frames), payload_bytes=size, start=identity.start, end=identity.end, digest=digest)
    return pb.PushRequest(commit=commit)


def make_stream(
    ticket: Ticket, identity: HandoffIdentity, contract: WorkerContract, cache: dict[tuple[str, int], Array]
) -> Requests:
    """open, frames, logits, commit."""
    frames = make_frames(ticket, identity, contract, cache)
    logits = make_logits(ticket, identity, contract)
    opening = make_open(ticket, identity, contract)
    return [opening, *frames, logits, make_commit(ticket, identity, frames, logits)]


async def push_generated(pair: Pair, requests: Sequence[pb.PushRequest]) -> list[pb.PushResponse]:
    """Sends through the plain generated stub. Raises the receiver's typed error."""

    def push() -> list[pb.PushResponse]:
        with sync_channel(pair.address) as link:
            granted = threading.Event()
            answers = transfer_pb2_grpc.TransferStub(link).Push(_waiting(requests, granted), timeout=WAIT_S)
            return list(_setting(answers, granted))

    return await _in_thread(push)


async def push_bytes(pair: Pair, messages: Sequence[bytes]) -> None:
    """Sends raw messages over the pair's transport. Raises the receiver's typed error."""
    if not pair.address:
        await _push_in_memory(pair, messages)
        return

    def push() -> None:
        with sync_channel(pair.address) as link:
            send: grpc.StreamStreamMultiCallable[bytes, bytes] = link.stream_stream(PUSH_METHOD)
            granted = threading.Event()
            for _ in _setting(send(_waiting(messages, granted), timeout=WAIT_S), granted):
                pass

    await _in_thread(push)


def _waiting(messages: Sequence[T], granted: threading.Event) -> Iterator[T]:
    """The first message; the others after the grant, or once the stream is over."""
    for place, message in enumerate(messages):
        if place == 1:
            granted.wait(WAIT_S)
        yield message


def _setting(answers: Iterable[T], granted: threading.Event) -> Iterator[T]:
    try:
        for answer in answers:
            granted.set()
            yield answer
    finally:
        granted.set()


async def _in_thread(push: Callable[[], T]) -> T:
    """Not with the asyncio client: it may replace the receiver's status when a write fails."""
    try:
        return await asyncio.to_thread(push)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def damaged(packed: PackedFrames, at: int = 0) -> PackedFrames:
    """A message of gRPC with one bit of one frame's payload turned over."""
    assert isinstance(packed.data, bytes)
    request = pb.PushRequest.FromString(packed.data)
    frame = request.frames.frames[at] if request.HasField("frames") else request.frame
    payload = bytearray(frame.payload)
    payload[len(payload) // 2] ^= 4
    frame.payload = bytes(payload)
    return replace(packed, data=request.SerializeToString())


def in_memory(data: bytes) -> Outgoing:
    """One message as the transport within a process takes it."""
    request = decode_request(data)
    match request:
        case Frame():
            return PackedFrames(request, ((request.digest, request.size),))
        case Frames() | SharedFrames():
            return PackedFrames(request, tuple((each.digest, each.size) for each in request.frames))
        case _:
            return request


async def _push_in_memory(pair: Pair, messages: Sequence[bytes]) -> None:
    stream = pair.transport.open(WAIT_S)
    try:
        for place, data in enumerate(messages):
            if place == 1:
                await stream.receive()  # the grant
            await stream.send(in_memory(data))
        await stream.finish_sending()
        async with asyncio.timeout(WAIT_S):
            while await stream.receive() is not None:
                pass
    finally:
        await stream.close()
