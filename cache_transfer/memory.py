"""A transport inside one process: the sender's messages reach a receiver through queues.

Queues: requests (producer: sender, consumer: receiver, bound `_BOUND`) and responses (the other
way; two at most). The receiver runs as a task of its own, as it would behind a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache_transfer.digests import frame_digest
from cache_transfer.messages import Frame, Frames, Outgoing, PackedFrames, Request, Response, SharedFrames, Unpacked
from cache_transfer.receiver import Receiver
from cache_transfer.shared import Ring
from cache_transfer.transport import PushStream
from cache_transfer.waiting import settle
from pdserve.errors import DataLoss, DeadlineExceeded, Internal, PdserveError

_BOUND = 8


class MemoryTransport:
    """Hands every stream to one receiver on the same event loop."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def pack(self, frames: Sequence[Unpacked], secret: bytes) -> PackedFrames:
        made: list[Frame] = []
        for each in frames:
            payload = memoryview(bytearray(each.payload_bytes))
            each.fill(payload)
            digest = frame_digest(secret, each.header, payload)
            made.append(Frame(memoryview(each.header), payload.toreadonly(), digest))
        data = made[0] if len(made) == 1 else Frames(tuple(made))
        return PackedFrames(data, tuple((each.digest, each.size) for each in made))

    def open(self, deadline_s: float) -> PushStream:
        return _MemoryStream(self._receiver, deadline_s)

    def take_ring(self, secret: bytes, largest_payload: int, whole: int) -> Ring | None:
        return None

    def give_ring_back(self, ring: Ring, *, unused: bool) -> None:
        raise Internal("no ring was taken")


class _ReceiverEnd:
    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request | None] = asyncio.Queue(_BOUND)
        self.responses: asyncio.Queue[Response] = asyncio.Queue()

    async def read(self) -> Request | None:
        return await self.requests.get()

    async def write(self, message: Response) -> None:
        self.responses.put_nowait(message)


class _MemoryStream:
    def __init__(self, receiver: Receiver, deadline_s: float) -> None:
        self._end = _ReceiverEnd()
        self._serving = asyncio.create_task(self._serve(receiver, deadline_s))

    async def _serve(self, receiver: Receiver, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await receiver.receive(self._end)
        except TimeoutError:
            raise DeadlineExceeded("the stream's deadline has passed", remedy="allow the handoff more time") from None

    async def send(self, message: Outgoing) -> None:
        request = message.data if isinstance(message, PackedFrames) else message
        if isinstance(request, (bytes, SharedFrames)):
            raise Internal("a frame was packed for another transport")
        await self._put(request)

    async def finish_sending(self) -> None:
        await self._put(None)

    async def receive(self) -> Response | None:
        get = asyncio.ensure_future(self._end.responses.get())
        if await self._first(get):
            return get.result()
        self._raise_failure()
        return None

    async def close(self) -> None:
        self._serving.cancel()
        await settle((self._serving,))

    async def _put(self, request: Request | None) -> None:
        put = asyncio.ensure_future(self._end.requests.put(request))
        if not await self._first(put):
            self._raise_failure()
            if request is not None:
                raise DataLoss(
                    "the receiver ended the stream before its acknowledgement",
                    reason="STREAM_ENDED",
                    remedy="send the cache again with a new ticket",
                )

    async def _first(self, operation: asyncio.Future[None] | asyncio.Future[Response]) -> bool:
        """Whether `operation` was done before the receiver ended; cancels it otherwise."""
        try:
            await asyncio.wait((operation, self._serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not operation.done():
                operation.cancel()
        return operation.done() and not operation.cancelled()

    def _raise_failure(self) -> None:
        if self._serving.cancelled():
            raise DataLoss(
                "the receiver was cancelled", reason="STREAM_ENDED", remedy="send the cache again with a new ticket"
            )
        error = self._serving.exception()
        if isinstance(error, PdserveError):
            raise error
        if error is not None:
            raise Internal("the server failed", remedy="see the server's log") from error
