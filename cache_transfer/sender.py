"""The prefill side of one handoff: push a cache while it is still being computed.

    OPENING --grant--> STREAMING --all announced and sent, logits--> COMMITTED --ack--> done
        \\________________|___________________________________________|
                  any error, `fail`, cancellation or deadline: the stream is cancelled,
                  worker threads are drained, then `run` raises

Queue: announced ranges (outbox.py). Producer: the engine thread. Consumer: `run`. Frames are read,
hashed and encoded in worker threads, one batch of `_BATCH_BYTES` ahead of the stream: more would leave
the processor's caches before it is sent. With shared memory (shared.py) a batch is one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from cache_transfer.codec import encode_header, payload_size
from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.digests import Manifest, logits_digest
from cache_transfer.messages import (
    MAX_FRAMES,
    MAX_PAYLOAD_BYTES,
    Ack,
    Commit,
    FrameHeader,
    Grant,
    Logits,
    PackedFrames,
    Release,
    SharedMemory,
)
from cache_transfer.opening import make_opening
from cache_transfer.outbox import Outbox
from cache_transfer.packing import copy_payload
from cache_transfer.pages import KVSource, Range
from cache_transfer.refusals import honest, unexpected
from cache_transfer.shared import Ring, make_ring, on_this_machine
from cache_transfer.transport import PushStream, Transport, Unpacked
from cache_transfer.waiting import Deadline, settle
from pdserve.errors import DataLoss, Internal, PdserveError

log = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 20
_SHARED_BATCH_BYTES = 2 << 20


@dataclass(frozen=True)
class SendReport:
    frames: int
    payload_bytes: int  # of the frames
    sent_tokens: int
    granted_at: float  # time.monotonic() when the grant came: no frame travels before it
    ack_at: float  # the same of the acknowledgement
    sending_s: float = 0.0  # of packing and sending frames, without the waits for what was not computed


class HandoffSender:
    """One handoff. Create it on the event loop that will run it.

    Call order: `run` once; meanwhile, from any thread, `computed` for every layer and token
    range, then `logits` once; or `fail` at any time.

    Args:
        source: must stay unchanged until `run` has returned or raised; nothing reads it afterwards.
        logits_only: no cache travels; `computed` is then ignored.
        max_payload_bytes: of one frame; the receiver may ask for less.
        deadline_s: for the whole of `run`.
        executor: threads that read and hash; default: the loop's own.
    """

    def __init__(
        self,
        transport: Transport,
        ticket: Ticket,
        identity: HandoffIdentity,
        contract: WorkerContract,
        source: KVSource,
        *,
        logits_only: bool,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        deadline_s: float = 60.0,
        executor: Executor | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._ticket = ticket
        self._identity = identity
        self._contract = contract
        self._source = source
        self._logits_only = logits_only
        self._max_payload_bytes = max_payload_bytes
        self._deadline_s = deadline_s
        self._executor = executor
        self._range = (identity.end if logits_only else identity.start, identity.end)
        self._outbox = Outbox(contract, *self._range)
        self._ring: Ring | None = None  # offered, and from the grant on: agreed
        self._together = MAX_FRAMES  # frames in a message
        self._taken = self._released = 0  # frames that were begun, and those whose slots are free again
        self._manifest = Manifest(ticket.secret, identity)
        self._deadline = Deadline(deadline_s)
        self._changed = asyncio.Event()
        self._grant: asyncio.Future[Grant] = self._loop.create_future()
        self._logits: Logits | None = None
        self._jobs: set[asyncio.Future[list[PackedFrames]]] = set()
        self._granted_at = self._sending_s = 0.0
        self._started = self._committed = self._stopped = False

    def computed(self, layer: int, tokens: Range) -> None:
        """Thread-safe. Every plane of `layer` is final in the source for `tokens`."""
        self._post(self._on_computed, layer, tokens)

    def logits(self, dtype: str, data: bytes, position: int) -> None:
        """Thread-safe. Raw scores [vocab_size], little endian, taken at prompt token `position`."""
        digest = logits_digest(self._ticket.secret, dtype, position, data)
        self._post(self._on_logits, Logits(dtype, data, position, digest))

    def fail(self, error: PdserveError) -> None:
        """Thread-safe. `run` raises `error`, unless it is over."""
        self._post(self._deadline.interrupt, error)

    async def run(self) -> SendReport:
        """Pushes the cache and returns when the receiver has verified it.

        Raises:
            PdserveError: the receiver's own, `fail`'s, DeadlineExceeded, or Unavailable. Where the
                receiver found a message malformed, DataLoss: it was not when it left.
            asyncio.CancelledError: after the stream was cancelled and threads were drained.
        """
        if self._started:
            raise Internal("a handoff is run once")
        self._started = True
        async with self._deadline:
            stream = self._transport.open(self._deadline_s)
            reader = asyncio.create_task(self._read_answers(stream))
            reader.add_done_callback(self._on_reader_done)
            try:
                ack = await self._push(stream, reader)
            except PdserveError as error:
                if (meant := honest(error)) is error:
                    raise
                raise meant from error
            finally:
                await self._close(stream, reader)
        if (ack.frames, ack.payload_bytes) != (self._manifest.frames, self._manifest.payload_bytes):
            raise DataLoss(f"the receiver acknowledged {ack}, sent were {self._manifest.frames} frames", reason="ACK")
        sent_tokens = self._range[1] - self._range[0]
        return SendReport(
            ack.frames, ack.payload_bytes, sent_tokens, self._granted_at, time.monotonic(), self._sending_s
        )

    async def _push(self, stream: PushStream, reader: asyncio.Task[Ack]) -> Ack:
        offer = self._offer_memory()
        opening = make_opening(
            self._ticket, self._identity, self._contract, logits_only=self._logits_only, shared=offer
        )
        await stream.send(opening)
        grant = await self._grant
        if offer is not None and not grant.shared:
            log.info("the receiver does not read shared memory: payloads go over the stream")
            self._drop_ring()
        if self._ring is None:
            self._together = min(grant.max_frames, MAX_FRAMES)
        await self._send_frames(stream, min(self._max_payload_bytes, grant.max_payload_bytes))
        logits = await self._wait_for_logits()
        await stream.send(logits)
        start, end = self._range
        digest = self._manifest.digest(logits.digest, start, end)
        self._committed = True
        await stream.send(Commit(self._manifest.frames, self._manifest.payload_bytes, start, end, digest))
        await stream.finish_sending()
        return await reader

    def _offer_memory(self) -> SharedMemory | None:
        if self._logits_only or not self._transport.shares_memory or not on_this_machine(self._ticket.endpoints):
            return None
        self._ring = make_ring(self._ticket.secret, *self._outbox.sizes(self._max_payload_bytes))
        return None if self._ring is None else self._ring.offer

    async def _send_frames(self, stream: PushStream, max_payload_bytes: int) -> None:
        packing: asyncio.Future[list[PackedFrames]] | None = None
        while True:
            ahead = packing or self._start_packing(max_payload_bytes)
            if ahead is not None:
                # Shielded: cancelling the wait must not lose track of the thread.
                began = time.monotonic()
                messages = await asyncio.shield(ahead)
                packing = self._start_packing(max_payload_bytes)
                for message in messages:
                    for digest, payload_bytes in message.frames:
                        self._manifest.add(digest, payload_bytes)
                    await stream.send(message)
                self._sending_s += time.monotonic() - began
            elif self._outbox.done:
                return
            else:
                await self._next_change()

    async def _wait_for_logits(self) -> Logits:
        while self._logits is None:
            await self._next_change()
        return self._logits

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _start_packing(self, max_payload_bytes: int) -> asyncio.Future[list[PackedFrames]] | None:
        """Begins the next batch; None: nothing is computed, or no slot is free."""
        batch_bytes, frames = _BATCH_BYTES, _BATCH_BYTES
        if self._ring is not None:
            batch_bytes = _SHARED_BATCH_BYTES
            frames = self._ring.slots - (self._taken - self._released)
        headers = self._outbox.take(batch_bytes, max_payload_bytes, frames)
        if not headers:
            return None
        self._taken += len(headers)
        job = self._loop.run_in_executor(self._executor, self._pack, headers)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def _pack(self, headers: list[FrameHeader]) -> list[PackedFrames]:
        """Reads, hashes and encodes frames. Runs in a worker thread."""
        pack = self._transport.pack if self._ring is None else self._ring.pack
        frames = [Unpacked(encode_header(h), payload_size(self._contract, h), partial(self._read, h)) for h in headers]
        parts = (frames[first : first + self._together] for first in range(0, len(frames), self._together))
        return [pack(part, self._ticket.secret) for part in parts]

    def _read(self, header: FrameHeader, out: memoryview) -> None:
        if not self._stopped:  # else nothing of this is sent any more
            copy_payload(self._source, header, out)

    async def _read_answers(self, stream: PushStream) -> Ack:
        grant = await stream.receive()
        if not isinstance(grant, Grant) or (grant.start, grant.end) != self._range:
            raise unexpected(grant, f"a grant for tokens {list(self._range)}")
        self._granted_at = time.monotonic()
        if not self._grant.done():  # else `run` was cancelled
            self._grant.set_result(grant)
        while isinstance(ack := await stream.receive(), Release):
            self._on_release(ack)
        if not isinstance(ack, Ack) or not self._committed:
            raise unexpected(ack, "an acknowledgement after the commit")
        end = await stream.receive()
        if end is not None:
            raise unexpected(end, "the end of the stream")
        return ack

    def _on_release(self, release: Release) -> None:
        if self._ring is None or not self._released <= release.frames <= self._manifest.frames:
            raise unexpected(release, f"at most {self._manifest.frames} frames to be released")
        self._released = release.frames
        self._changed.set()

    async def _close(self, stream: PushStream, reader: asyncio.Task[Ack]) -> None:
        """Nothing of this handoff runs or reads the source after this."""
        self._stopped = True
        reader.cancel()
        try:
            await settle((reader, *self._jobs))
        finally:
            self._drop_ring()
            await stream.close()

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _on_reader_done(self, reader: asyncio.Task[Ack]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if isinstance(error, PdserveError):
            self._deadline.interrupt(honest(error))
        elif error is not None:
            self._deadline.interrupt(Internal(f"reading the receiver's answers failed: {error!r}"))

    def _on_computed(self, layer: int, tokens: Range) -> None:
        if self._logits_only:
            return
        try:
            self._outbox.announce(layer, tokens)
        except PdserveError as error:
            self._deadline.interrupt(error)
        self._changed.set()

    def _on_logits(self, logits: Logits) -> None:
        self._logits = logits
        self._changed.set()

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and `run` over with it
            self._loop.call_soon_threadsafe(callback, *args)
