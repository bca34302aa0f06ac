"""The prefill side of one handoff: push a cache while it is still being computed.

    OPENING --grant--> STREAMING --all announced and sent, logits--> COMMITTED --ack--> done
        \\________________|___________________________________________|
                  any error, `fail`, cancellation or deadline: the stream is cancelled,
                  worker threads are drained, then `run` raises

Queue: announced ranges (outbox.py). Producer: the engine thread. Consumer: `run`. Frames are read,
hashed and encoded in worker threads, at most `_JOBS` batches of `_BATCH_BYTES` ahead of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from cache_transfer.codec import encode_header, payload_size
from cache_transfer.contract import HandoffIdentity, Ticket, WorkerContract
from cache_transfer.digests import Manifest, logits_digest
from cache_transfer.messages import (
    MAX_PAYLOAD_BYTES,
    Ack,
    Commit,
    FrameHeader,
    Grant,
    Logits,
    PackedFrame,
    Response,
)
from cache_transfer.opening import make_opening
from cache_transfer.outbox import Outbox
from cache_transfer.pages import DirectSource, KVSource, Range
from cache_transfer.transport import PushStream, Transport
from cache_transfer.waiting import Deadline, settle
from pdserve.errors import DataLoss, Internal, InvalidRequest, PdserveError

_BATCH_BYTES = 4 << 20
_JOBS = 2


@dataclass(frozen=True)
class SendReport:
    frames: int
    payload_bytes: int  # of the frames
    sent_tokens: int
    granted_at: float  # time.monotonic() when the grant came: no frame travels before it
    ack_at: float  # the same of the acknowledgement


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
        self._manifest = Manifest(ticket.secret, identity)
        self._deadline = Deadline(deadline_s)
        self._changed = asyncio.Event()
        self._grant: asyncio.Future[Grant] = self._loop.create_future()
        self._logits: Logits | None = None
        self._jobs: set[asyncio.Future[list[PackedFrame]]] = set()
        self._granted_at = 0.0
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
                if (honest := _honest(error)) is error:
                    raise
                raise honest from error
            finally:
                await self._close(stream, reader)
        if (ack.frames, ack.payload_bytes) != (self._manifest.frames, self._manifest.payload_bytes):
            raise DataLoss(f"the receiver acknowledged {ack}, sent were {self._manifest.frames} frames", reason="ACK")
        sent_tokens = self._range[1] - self._range[0]
        return SendReport(ack.frames, ack.payload_bytes, sent_tokens, self._granted_at, time.monotonic())

    async def _push(self, stream: PushStream, reader: asyncio.Task[Ack]) -> Ack:
        await stream.send(make_opening(self._ticket, self._identity, self._contract, logits_only=self._logits_only))
        grant = await self._grant
        await self._send_frames(stream, min(self._max_payload_bytes, grant.max_payload_bytes))
        logits = await self._wait_for_logits()
        await stream.send(logits)
        start, end = self._range
        digest = self._manifest.digest(logits.digest, start, end)
        self._committed = True
        await stream.send(Commit(self._manifest.frames, self._manifest.payload_bytes, start, end, digest))
        await stream.finish_sending()
        return await reader

    async def _send_frames(self, stream: PushStream, max_payload_bytes: int) -> None:
        packing: deque[asyncio.Future[list[PackedFrame]]] = deque()
        while True:
            while len(packing) < _JOBS and (headers := self._outbox.take(_BATCH_BYTES, max_payload_bytes)):
                packing.append(self._start_packing(headers))
            if packing:
                # Shielded: cancelling the wait must not lose track of the thread.
                for frame in await asyncio.shield(packing.popleft()):
                    self._manifest.add(frame.digest, frame.payload_bytes)
                    await stream.send(frame)
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

    def _start_packing(self, headers: list[FrameHeader]) -> asyncio.Future[list[PackedFrame]]:
        job = self._loop.run_in_executor(self._executor, self._pack, headers)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def _pack(self, headers: list[FrameHeader]) -> list[PackedFrame]:
        """Reads, hashes and encodes frames. Runs in a worker thread."""
        packed: list[PackedFrame] = []
        for header in headers:
            if self._stopped:
                break
            size = payload_size(self._contract, header)
            fill = partial(_fill, self._source, header)
            packed.append(self._transport.pack(encode_header(header), size, fill, self._ticket.secret))
        return packed

    async def _read_answers(self, stream: PushStream) -> Ack:
        grant = await stream.receive()
        if not isinstance(grant, Grant) or (grant.start, grant.end) != self._range:
            raise _unexpected(grant, f"a grant for tokens {list(self._range)}")
        self._granted_at = time.monotonic()
        if not self._grant.done():  # else `run` was cancelled
            self._grant.set_result(grant)
        ack = await stream.receive()
        if not isinstance(ack, Ack) or not self._committed:
            raise _unexpected(ack, "an acknowledgement after the commit")
        end = await stream.receive()
        if end is not None:
            raise _unexpected(end, "the end of the stream")
        return ack

    async def _close(self, stream: PushStream, reader: asyncio.Task[Ack]) -> None:
        """Nothing of this handoff runs or reads the source after this."""
        self._stopped = True
        reader.cancel()
        try:
            await settle((reader, *self._jobs))
        finally:
            await stream.close()

    def _on_reader_done(self, reader: asyncio.Task[Ack]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if isinstance(error, PdserveError):
            self._deadline.interrupt(_honest(error))
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


def _fill(source: KVSource, header: FrameHeader, out: memoryview) -> None:
    """Copies what the header names from the source to `out`."""
    where = header.plane, header.layer, header.heads, header.tokens
    if isinstance(source, DirectSource):
        source.read_into(*where, out)
        return
    at = 0
    for piece in source.read(*where):
        end = at + piece.nbytes
        if end > len(out):
            raise Internal(f"the source gave more than {len(out)} bytes for {header}")
        out[at:end] = piece.cast("B") if piece.c_contiguous else piece.tobytes()
        at = end
    if at != len(out):
        raise Internal(f"the source gave {at} bytes instead of {len(out)} for {header}")


def _honest(error: PdserveError) -> PdserveError:
    """What a receiver's refusal means for a sender that follows the protocol.

    Where it read nonsense, or a proof that does not fit, bytes have changed on the way: no fault of
    whoever asked for the handoff, and another attempt may bring them whole.
    """
    if not isinstance(error, InvalidRequest) and error.reason != "PROOF":
        return error
    return DataLoss(
        f"the receiver did not get what was sent: {error.message}",
        reason=error.reason,
        field=error.field,
        remedy="send the cache again with a new ticket",
    )


def _unexpected(message: Response | None, expected: str) -> DataLoss:
    return DataLoss(f"the receiver answered {message}, expected was {expected}", reason="UNEXPECTED_ANSWER")
