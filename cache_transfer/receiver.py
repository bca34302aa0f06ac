"""The decode side of handoffs: take a cache, verify every byte, hand it to the host.

One attempt, from the first message of its stream:

    OPENING --claim--> GRANTED --grant--> RECEIVING --commit verified--> VERIFIED --ack--> done
       |                  |                   |
       | refused:         `--------+----------'
       | no claim, the             | any error, deadline, `revoke`, cancellation:
       | host hears nothing        v
       v                        ABORTED: writers drained, then host.aborted, then the error
     the error                           is raised to the sender

For every claim the host hears exactly one of `verified` and `aborted`. Everything here runs on
one event loop, except verifying and writing frames (writers.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from cache_transfer import digests
from cache_transfer.allocator import keep_freed_frames
from cache_transfer.codec import ITEM_BYTES, Coverage, decode_header
from cache_transfer.contract import WorkerContract
from cache_transfer.messages import (
    MAX_PAYLOAD_BYTES,
    Ack,
    Commit,
    Frame,
    FrameHeader,
    Grant,
    Logits,
    PushOpening,
    Request,
    Response,
)
from cache_transfer.pages import PageSink
from cache_transfer.refusals import data_loss, out_of_order, sender_gone, stale
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.waiting import Deadline
from cache_transfer.writers import Writers
from pdserve.errors import Internal, InvalidRequest, PdserveError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReceiverSettings:
    open_timeout_s: float = 10.0
    """From the start of a stream until its first message."""

    idle_timeout_s: float = 60.0
    """Between two messages; the sender may be computing."""

    handoff_timeout_s: float = 600.0
    """From claim to acknowledgement, waiting for pages included."""

    threads: int = 2
    """Threads that verify and write, for all handoffs together."""

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """Largest payload of one frame."""


@dataclass(frozen=True)
class ReceivedLogits:
    """Raw scores of the first output token, [vocab_size] in little-endian `dtype`."""

    dtype: str  # fp32 | float64
    data: bytes
    position: int


@dataclass(frozen=True)
class ReceiveReport:
    frames: int
    payload_bytes: int
    seconds: float  # from grant to verified


class ReceiverHost(Protocol):
    """Who owns the pages. All methods are called on the receiver's event loop."""

    async def grant(self, claim: Claim) -> PageSink:
        """Waits for pages for tokens [claim.start, claim.end), none for logits only.

        What is written into the sink is in `claim.kv_dtype`, the sender's.
        Cancelled when the ticket expires. Raises Exhausted, Cancelled or any PdserveError to
        refuse; `aborted` is called then too, so what was reserved is freed in one place.
        """
        ...

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        """Every byte is in the pages and verified: the sequence may decode."""
        ...

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        """The attempt is over and nothing will write any more: its pages may be freed."""
        ...


class ReceiverStream(Protocol):
    """One handoff's stream, as its receiver sees it."""

    async def read(self) -> Request | None:
        """The next message; None when the sender has finished. Raises InvalidRequest for other bytes."""
        ...

    async def write(self, message: Response) -> None: ...


@dataclass
class _Attempt:
    claim: Claim
    deadline: Deadline
    writers: Writers | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Receiver:
    """Takes the handoffs of one decode worker. Call `close` when no stream is left."""

    def __init__(
        self, book: TicketBook, contract: WorkerContract, host: ReceiverHost, settings: ReceiverSettings | None = None
    ) -> None:
        keep_freed_frames()
        self._book = book
        self._contract = contract
        self._host = host
        self._settings = settings or ReceiverSettings()
        self._executor = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="cache-receiver")
        self._attempts: dict[bytes, list[_Attempt]] = {}
        self.active = 0
        """Streams being served, from before the claim until after the acknowledgement."""

    async def receive(self, stream: ReceiverStream) -> None:
        """Serves one stream to its end. Raises the error that its sender must see."""
        self.active += 1
        try:
            claim = self._book.claim(await self._read_opening(stream), self._contract)
            report = await self._run_attempt(stream, _Attempt(claim, Deadline(self._settings.handoff_timeout_s)))
            async with Deadline(self._settings.idle_timeout_s) as deadline:
                deadline.extend(self._settings.idle_timeout_s, "the sender to take the acknowledgement")
                await stream.write(Ack(report.frames, report.payload_bytes))
        finally:
            self.active -= 1

    async def revoke(self, handoff_id: bytes) -> None:
        """Ends the running attempts of a handoff; on return nothing writes for them any more.

        First make them stale in the book (`reissue` or `close`), so that none can start anew.
        """
        running = tuple(self._attempts.get(handoff_id, ()))
        for each in running:
            each.deadline.interrupt(stale("this attempt was revoked"))
        for each in running:
            await each.over.wait()

    def close(self) -> None:
        """Ends the threads; waits for jobs that run."""
        self._executor.shutdown()

    async def _read_opening(self, stream: ReceiverStream) -> PushOpening:
        async with Deadline(self._settings.open_timeout_s) as deadline:
            deadline.extend(self._settings.open_timeout_s, "the first message")
            message = await stream.read()
        if not isinstance(message, PushOpening):
            raise out_of_order(message, "open")
        return message

    async def _run_attempt(self, stream: ReceiverStream, attempt: _Attempt) -> ReceiveReport:
        """From claim to `verified`, or to `aborted` and an error."""
        claim = attempt.claim
        self._attempts.setdefault(claim.handoff_id, []).append(attempt)
        error: PdserveError | None = Internal("the receiver failed", remedy="see its log")
        try:
            async with attempt.deadline:
                logits, report = await self._take(stream, attempt)
                self._check_current(attempt)  # no await between this and `verified`
                self._host.verified(claim, logits, report)
                error = None
            return report
        except PdserveError as failure:
            error = failure
            raise
        except asyncio.CancelledError:
            error = error and sender_gone()
            raise
        finally:
            await self._end_attempt(attempt, error)

    async def _end_attempt(self, attempt: _Attempt, error: PdserveError | None) -> None:
        try:
            if attempt.writers is not None:
                await attempt.writers.drain()
        finally:
            self._forget(attempt)
            if error is not None:
                log.warning(
                    "handoff %s attempt %d aborted: %s: %s",
                    attempt.claim.handoff_id.hex(),
                    attempt.claim.attempt,
                    error.reason,
                    error,
                )
                self._host.aborted(attempt.claim, error)
            attempt.over.set()

    async def _take(self, stream: ReceiverStream, attempt: _Attempt) -> tuple[ReceivedLogits, ReceiveReport]:
        """Everything from the grant to the verified commit."""
        claim, deadline = attempt.claim, attempt.deadline
        for older in self._attempts[claim.handoff_id][:-1]:  # its pages may be this one's
            deadline.extend(self._settings.idle_timeout_s, "an older attempt to end")
            await older.over.wait()
        deadline.extend(claim.expires_at - self._book.clock(), "pages, until the ticket expired")
        sink = await self._host.grant(claim)
        self._check_current(attempt)
        granted_at = time.monotonic()
        attempt.writers = Writers(
            self._executor, sink, claim.secret, lambda: self._check_current(attempt), deadline.interrupt
        )
        limit = self._settings.max_payload_bytes
        coverage = Coverage(self._contract, claim.start, claim.end, limit, claim.kv_dtype)
        manifest = digests.Manifest(claim.secret, claim.identity)
        await stream.write(Grant(claim.start, claim.end, limit))
        message = await self._next(stream, deadline, "a frame")
        while isinstance(message, Frame):
            header = _accepted(message, coverage, claim.secret)
            manifest.add(message.digest, len(message.payload))
            await attempt.writers.put(header, message)
            message = await self._next(stream, deadline, "a frame")
        if not isinstance(message, Logits):
            raise out_of_order(message, "frame or logits")
        logits = self._check_logits(claim, message)
        commit = await self._next(stream, deadline, "the commit")
        if not isinstance(commit, Commit):
            raise out_of_order(commit, "commit")
        await attempt.writers.finish()  # a byte that did not verify is the more telling error
        _check_commit(commit, claim, coverage, manifest, message)
        return logits, ReceiveReport(manifest.frames, manifest.payload_bytes, time.monotonic() - granted_at)

    async def _next(self, stream: ReceiverStream, deadline: Deadline, what: str) -> Request | None:
        deadline.extend(self._settings.idle_timeout_s, what)
        return await stream.read()

    def _check_current(self, attempt: _Attempt) -> None:
        attempt.deadline.check()
        if not self._book.is_current(attempt.claim.handoff_id, attempt.claim.attempt):
            raise stale("this attempt is no longer current")

    def _check_logits(self, claim: Claim, message: Logits) -> ReceivedLogits:
        digest = digests.logits_digest(claim.secret, message.dtype, message.position, message.data)
        if not digests.same(digest, message.digest):
            raise data_loss("the logits did not verify", "LOGITS_DIGEST", "logits")
        dtype = "float64" if self._contract.activation_dtype == "float64" else "fp32"
        size = self._contract.vocab_size * ITEM_BYTES[dtype]
        if message.dtype != dtype:
            raise InvalidRequest(f"{message.dtype[:32]!r} is not {dtype}", reason="LOGITS_DTYPE", field="logits.dtype")
        if len(message.data) != size:
            raise InvalidRequest(f"{len(message.data)} bytes, not {size}", reason="LOGITS_SIZE", field="logits.data")
        if message.position != claim.end - 1:
            raise InvalidRequest(
                f"taken at token {message.position}, the prompt's last is {claim.end - 1}",
                reason="LOGITS_POSITION",
                field="logits.position",
            )
        return ReceivedLogits(message.dtype, message.data, message.position)

    def _forget(self, attempt: _Attempt) -> None:
        running = self._attempts[attempt.claim.handoff_id]
        running.remove(attempt)
        if not running:
            del self._attempts[attempt.claim.handoff_id]


def _accepted(frame: Frame, coverage: Coverage, secret: bytes) -> FrameHeader:
    """The header of a frame that may come next.

    One that makes no sense was damaged on its way, and may be sent again, unless its digest says
    that its sender meant it. All others are hashed by the writers, off the event loop.
    """
    try:
        header = decode_header(frame.header)
        coverage.accept(header, len(frame.payload))
    except InvalidRequest as error:
        if digests.same(digests.frame_digest(secret, frame.header, frame.payload), frame.digest):
            raise
        raise data_loss(f"a frame did not verify; as it is, {error.message}", "FRAME_DIGEST", "frame") from None
    return header


def _check_commit(commit: Commit, claim: Claim, coverage: Coverage, manifest: digests.Manifest, logits: Logits) -> None:
    if not coverage.complete:
        raise data_loss(f"the commit came before {coverage.missing()}", "FRAMES_MISSING", "commit")
    expected = (manifest.frames, manifest.payload_bytes, claim.start, claim.end)
    stated = (commit.frames, commit.payload_bytes, commit.start, commit.end)
    if stated != expected:
        raise data_loss(f"the manifest says {stated}, received were {expected}", "MANIFEST", "commit")
    if not digests.same(manifest.digest(logits.digest, claim.start, claim.end), commit.digest):
        raise data_loss("the manifest did not verify", "MANIFEST", "commit")
