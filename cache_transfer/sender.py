"""The prefill side of one handoff: push a cache while it is still being computed.

    OPENING --grant--> STREAMING --all announced and sent, logits--> COMMITTED --ack--> done
        \\________________|___________________________________________|
                  any error, `fail`, cancellation or deadline: the stream is cancelled,
                  worker threads are drained, then `run` raises

Frames travel in messages (message_frames.py) or through shared memory (ring_frames.py), as the grant says. They are
read, hashed and written in worker threads. Queue: announced ranges (outbox.py). Producer: the engine thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.digests import Manifest, logits_digest
from cache_transfer.message_frames import MessageFrames
from cache_transfer.messages import (
    MAX_FRAMES,
    MAX_PAYLOAD_BYTES,
    Ack,
    Commit,
    Grant,
    Logits,
    Release,
    SharedMemory,
)
from cache_transfer.opening import make_opening
from cache_transfer.outbox import Outbox
from cache_transfer.packing import Cargo
from cache_transfer.pages import KVSource, Range
from cache_transfer.refusals import honest, unexpected
from cache_transfer.ring_frames import RingFrames
from cache_transfer.shared import Ring, on_this_machine
from cache_transfer.transport import PushStream, Transport
from cache_transfer.waiting import Deadline, settle
from pdserve.errors import DataLoss, Internal, PdserveError

log = logging.getLogger(__name__)


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
        self._logits_only = logits_only
        self._deadline_s = deadline_s
        self._range = (identity.end if logits_only else identity.start, identity.end)
        self._manifest = Manifest(ticket.secret, identity)
        self._outbox = Outbox(contract, *self._range)
        self._cargo = Cargo(self._outbox, self._manifest, contract, source, ticket.secret, executor, max_payload_bytes)
        self._ring: Ring | None = None  # offered, and from the grant on: agreed
        self._deadline = Deadline(deadline_s)
        self._grant: asyncio.Future[Grant] = self._loop.create_future()
        self._logits: Logits | None = None
        self._granted_at = 0.0
        self._started = self._offered = self._committed = self._acknowledged = False

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
                self._acknowledged = True
            except PdserveError as error:
                if (meant := honest(error)) is error:
                    raise
                raise meant from error
            finally:
                await self._close(stream, reader)
        if (ack.frames, ack.payload_bytes) != (self._manifest.frames, self._manifest.payload_bytes):
            raise DataLoss(
                f"the receiver acknowledged {ack}, sent were {self._manifest.frames} frames",
                reason="ACK",
                remedy="send the cache again with a new ticket",
            )
        sent_tokens = self._range[1] - self._range[0]
        return SendReport(
            ack.frames, ack.payload_bytes, sent_tokens, self._granted_at, time.monotonic(), self._cargo.seconds
        )

    async def _push(self, stream: PushStream, reader: asyncio.Task[Ack]) -> Ack:
        offer = self._offer_memory()
        opening = make_opening(
            self._ticket, self._identity, self._contract, logits_only=self._logits_only, shared=offer
        )
        await stream.send(opening)
        grant = await self._grant
        if offer is not None and not grant.queue:
            log.info("the receiver does not read shared memory: payloads go over the stream")
            self._drop_ring()
        self._cargo.max_payload_bytes = min(self._cargo.max_payload_bytes, grant.max_payload_bytes)
        if self._ring is not None:
            await RingFrames(self._cargo, self._ring).send(stream)
        else:
            await MessageFrames(self._cargo, self._transport, min(grant.max_frames, MAX_FRAMES)).send(stream)
        logits = await self._wait_for_logits()
        await stream.send(logits)
        start, end = self._range
        digest = self._manifest.digest(logits.digest, start, end)
        self._committed = True
        await stream.send(Commit(self._manifest.frames, self._manifest.payload_bytes, start, end, digest))
        await stream.finish_sending()
        return await reader

    def _offer_memory(self) -> SharedMemory | None:
        if self._logits_only or not on_this_machine(self._ticket.endpoints):
            return None
        self._ring = self._transport.take_ring(self._ticket.secret, *self._outbox.sizes(self._cargo.max_payload_bytes))
        self._offered = self._ring is not None
        return None if self._ring is None else self._ring.offer

    async def _wait_for_logits(self) -> Logits:
        while self._logits is None:
            await self._cargo.next_change()
        return self._logits

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
        """With a queue, how many frames are done stands there, and this only says that it is time to look."""
        if not self._offered or (self._ring is None and release.frames > self._manifest.frames):
            raise unexpected(release, "no more frames to be released than were sent")
        self._cargo.changed.set()

    async def _close(self, stream: PushStream, reader: asyncio.Task[Ack]) -> None:
        """Nothing of this handoff runs or reads the source after this."""
        reader.cancel()
        try:
            await self._cargo.stop()
            await settle((reader,))
        finally:
            self._drop_ring()
            await stream.close()

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._transport.give_ring_back(self._ring, unused=self._acknowledged)
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
        self._cargo.changed.set()

    def _on_logits(self, logits: Logits) -> None:
        self._logits = logits
        self._cargo.changed.set()

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and `run` over with it
            self._loop.call_soon_threadsafe(callback, *args)
