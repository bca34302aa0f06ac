"""Frames in messages: read, hashed and encoded in worker threads, one batch ahead of the stream."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from cache_transfer.messages import FrameHeader, PackedFrames
from cache_transfer.packing import Cargo
from cache_transfer.transport import PushStream, Transport

_BATCH_BYTES = 1 << 20  # more would leave the processor's caches before it is sent


class MessageFrames:
    """Args: `together`: frames in a message."""

    def __init__(self, cargo: Cargo, transport: Transport, together: int) -> None:
        self._cargo = cargo
        self._transport = transport
        self._together = together

    async def send(self, stream: PushStream) -> None:
        """Returns when all frames were announced and are sent."""
        cargo = self._cargo
        packing: asyncio.Future[list[PackedFrames]] | None = None
        while True:
            ahead = packing or self._start_packing()
            if ahead is not None:
                # Shielded: cancelling the wait must not lose track of the thread.
                began = time.monotonic()
                messages = await asyncio.shield(ahead)
                packing = self._start_packing()
                for message in messages:
                    for digest, payload_bytes in message.frames:
                        cargo.manifest.add(digest, payload_bytes)
                    await stream.send(message)
                cargo.seconds += time.monotonic() - began
            elif cargo.outbox.done:
                return
            else:
                await cargo.next_change()

    def _start_packing(self) -> asyncio.Future[list[PackedFrames]] | None:
        """Begins the next batch; None: nothing is computed."""
        headers = self._cargo.outbox.take(_BATCH_BYTES, self._cargo.max_payload_bytes)
        return self._cargo.start(partial(self._pack, headers)) if headers else None

    def _pack(self, headers: list[FrameHeader]) -> list[PackedFrames]:
        """Runs in a worker thread."""
        frames = [self._cargo.unpacked(header) for header in headers]
        parts = (frames[first : first + self._together] for first in range(0, len(frames), self._together))
        return [self._transport.pack(part, self._cargo.secret) for part in parts]
