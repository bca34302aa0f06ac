"""How a sender reaches a receiver: the boundary, and its gRPC implementation.

`memory.py` is the other implementation. Both are run through the same tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from cache_transfer.allocator import keep_freed_frames
from cache_transfer.digests import frame_digest
from cache_transfer.framing import FrameBuffer
from cache_transfer.messages import Outgoing, PackedFrames, Response, Unpacked
from cache_transfer.push import decode_response, encode_request
from cache_transfer.rings import Rings
from cache_transfer.shared import Ring
from pdserve.errors import DataLoss, PdserveError, Unavailable
from pdserve.rpc.status import from_rpc_error, is_lost
from pdserve.rpc.writing import write
from pdserve.telemetry.context import outgoing

PUSH_METHOD = "/pdserve.v1.Transfer/Push"
RECEIVER_LOST = "RECEIVER_LOST"


class PushStream(Protocol):
    """One handoff's stream, as its sender sees it.

    Order: send* and receive* (at the same time, from one task each), then `close`. Both raise
    the receiver's typed error once the receiver has refused or failed, and Unavailable
    (RECEIVER_LOST) when the stream breaks without one.
    """

    async def send(self, message: Outgoing) -> None:
        """Returns when the transport has taken the message; this is the backpressure."""
        ...

    async def receive(self) -> Response | None:
        """The receiver's next answer; None when it has ended the stream without an error."""
        ...

    async def finish_sending(self) -> None: ...

    async def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        ...


class Transport(Protocol):
    def pack(self, frames: Sequence[Unpacked], secret: bytes) -> PackedFrames:
        """One message in the form that `send` takes. Called from worker threads.

        Args:
            frames: at least one; several only for a receiver whose grant says so. Each one's `fill`
                writes the payload into the memory it is given, and keeps no view of it.
            secret: of the ticket, for the frames' digests.
        """
        ...

    def open(self, deadline_s: float) -> PushStream:
        """A new stream that lives for at most `deadline_s` seconds. Connects on first use."""
        ...

    def take_ring(self, secret: bytes, largest_payload: int, whole: int) -> Ring | None:
        """Memory to offer to a receiver on this machine, as `Rings.take`; None: payloads go over the stream."""
        ...

    def give_ring_back(self, ring: Ring, *, unused: bool) -> None:
        """As `Rings.give_back`."""
        ...


class GrpcTransport:
    """Pushes over a channel of `pdserve.rpc.channel`. Belongs to that channel's event loop."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "", rings: Rings | None = None) -> None:
        """
        Args:
            address: named in errors that the receiver did not write itself.
            rings: memory that receivers on this machine may read; None: none.
        """
        keep_freed_frames()
        # No serializers: bytes in, bytes out; push.py does both.
        self._push: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PUSH_METHOD)
        self._address = address
        self._rings = rings

    def pack(self, frames: Sequence[Unpacked], secret: bytes) -> PackedFrames:
        buffer = FrameBuffer([(each.header, each.payload_bytes) for each in frames])
        digests: list[bytes] = []
        for each, payload in zip(frames, buffer.payloads, strict=True):
            each.fill(payload)
            digests.append(frame_digest(secret, each.header, payload))
        sizes = (each.payload_bytes for each in frames)
        return PackedFrames(buffer.seal(digests), tuple(zip(digests, sizes, strict=True)))

    def open(self, deadline_s: float) -> PushStream:
        return _GrpcStream(self._push(timeout=deadline_s, metadata=outgoing()), self._address)

    def take_ring(self, secret: bytes, largest_payload: int, whole: int) -> Ring | None:
        return None if self._rings is None else self._rings.take(self._address, secret, largest_payload, whole)

    def give_ring_back(self, ring: Ring, *, unused: bool) -> None:
        if self._rings is not None:
            self._rings.give_back(self._address, ring, unused=unused)


class _GrpcStream:
    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes], address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, message: Outgoing) -> None:
        try:
            sent = await write(self._call, encode_request(message))
        except grpc.RpcError as error:
            raise call_error(error, self._address) from None
        if not sent:
            raise await self._failure()

    async def receive(self) -> Response | None:
        try:
            data = await self._call.read()
        except grpc.RpcError as error:
            raise call_error(error, self._address) from None
        return decode_response(data) if isinstance(data, bytes) else None

    async def finish_sending(self) -> None:
        await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()

    async def _failure(self) -> PdserveError:
        """Why a write failed: the call is over, and its status, once it is here, says."""
        await self._call.code()
        try:
            await self._call.wait_for_connection()  # raises for a status that is not OK
        except grpc.RpcError as error:
            return call_error(error, self._address)
        return DataLoss(
            "the receiver ended the stream before its acknowledgement",
            reason="STREAM_ENDED",
            remedy="send the cache again with a new ticket",
        )


def call_error(error: grpc.RpcError, address: str) -> PdserveError:
    """What the receiver said; or RECEIVER_LOST, which another attempt may repair, when the stream broke unexplained."""
    found = from_rpc_error(error, address)
    if not is_lost(error):
        return found
    return Unavailable(
        f"the receiver was lost: {found.message}",
        reason=RECEIVER_LOST,
        field="transfer",
        remedy="send the request again",
    )
