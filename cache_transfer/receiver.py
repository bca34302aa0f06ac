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
one event loop, except verifying and writing frames (intake.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cache_transfer.allocator import keep_freed_frames
from cache_transfer.attempt import Attempt
from cache_transfer.checks import check_logits
from cache_transfer.contract import WorkerContract
from cache_transfer.intake import AnyIntake, Incoming, Intake
from cache_transfer.messages import (
    MAX_PAYLOAD_BYTES,
    Ack,
    Commit,
    Frame,
    Frames,
    Logits,
    PushOpening,
    Queued,
    Request,
    Response,
    SharedFrames,
)
from cache_transfer.pages import PageSink
from cache_transfer.queue_intake import QueueIntake
from cache_transfer.refusals import out_of_order, sender_gone, stale
from cache_transfer.shared import open_offered
from cache_transfer.tickets import Claim, TicketBook
from cache_transfer.tracing import Receipt
from cache_transfer.waiting import Deadline, settle
from pdserve.errors import Internal, PdserveError
from pdserve.telemetry.traces import OFF, Traces

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

    shared_memory: bool = True
    """Whether payloads are read from memory that a sender on this machine offers."""


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


class Receiver:
    """Takes the handoffs of one decode worker. Call `close` when no stream is left."""

    def __init__(
        self,
        book: TicketBook,
        contract: WorkerContract,
        host: ReceiverHost,
        settings: ReceiverSettings | None = None,
        traces: Traces = OFF,
    ) -> None:
        self._traces = traces
        keep_freed_frames()
        self._book = book
        self._contract = contract
        self._host = host
        self._settings = settings or ReceiverSettings()
        self._executor = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="cache-receiver")
        self._attempts: dict[bytes, list[Attempt]] = {}
        self.active = 0
        """Streams being served, from before the claim until after the acknowledgement."""

    async def receive(self, stream: ReceiverStream) -> None:
        """Serves one stream to its end. Raises the error that its sender must see."""
        self.active += 1
        try:
            opening = await self._read_opening(stream)
            claim = self._book.claim(opening, self._contract)
            offer = opening.shared if self._settings.shared_memory else None
            deadline, receipt = Deadline(self._settings.handoff_timeout_s), Receipt(self._traces, claim)
            attempt = Attempt(claim, deadline, self._book, offer, receipt, self._settings.idle_timeout_s)
            report = await self._run_attempt(stream, attempt)
            async with Deadline(self._settings.idle_timeout_s) as last:
                last.extend(self._settings.idle_timeout_s, "the sender to take the acknowledgement")
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

    async def _run_attempt(self, stream: ReceiverStream, attempt: Attempt) -> ReceiveReport:
        """From claim to `verified`, or to `aborted` and an error."""
        claim = attempt.claim
        self._attempts.setdefault(claim.handoff_id, []).append(attempt)
        error: PdserveError | None = Internal("the receiver failed", remedy="see its log")
        try:
            async with attempt.deadline:
                logits, report = await self._take(stream, attempt)
                attempt.may_write()  # no await between this and `verified`
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

    async def _end_attempt(self, attempt: Attempt, error: PdserveError | None) -> None:
        try:
            if attempt.intake is not None:
                await attempt.intake.drain()
        finally:
            self._forget(attempt)
            attempt.receipt.end(attempt.intake, error)
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

    async def _take(self, stream: ReceiverStream, attempt: Attempt) -> tuple[ReceivedLogits, ReceiveReport]:
        """Everything from the grant to the verified commit."""
        claim, deadline = attempt.claim, attempt.deadline
        reading = asyncio.ensure_future(stream.read())
        try:
            sink = await self._wait_for_pages(attempt, reading)
            attempt.may_write()
            granted_at = time.monotonic()
            attempt.receipt.granted()
            intake = attempt.intake = self._make_intake(attempt, sink, stream)
            await stream.write(intake.grant)
            message = await self._next(stream, deadline, "a frame", reading)
        finally:
            reading.cancel()
            await settle((reading,))
        while isinstance(message, (Frame, Frames, SharedFrames, Queued)):
            await intake.take(message)
            message = await self._next(stream, deadline, "a frame")
        if not isinstance(message, Logits):
            raise out_of_order(message, "frame or logits")
        check_logits(message, claim, self._contract)
        commit = await self._next(stream, deadline, "the commit")
        if not isinstance(commit, Commit):
            raise out_of_order(commit, "commit")
        attempt.receipt.committed()
        await intake.finish(message, commit)
        manifest = intake.manifest
        report = ReceiveReport(manifest.frames, manifest.payload_bytes, time.monotonic() - granted_at)
        return ReceivedLogits(message.dtype, message.data, message.position), report

    def _make_intake(self, attempt: Attempt, sink: PageSink, stream: ReceiverStream) -> AnyIntake:
        claim, limit = attempt.claim, self._settings.max_payload_bytes
        shared = open_offered(attempt.offer, claim.secret)
        given = Incoming(self._executor, sink, claim, self._contract, limit, shared, attempt, stream.write)
        return Intake(given) if shared is None or shared.queue is None else QueueIntake(given, shared.queue)

    async def _wait_for_pages(self, attempt: Attempt, reading: asyncio.Future[Request | None]) -> PageSink:
        """The host's sink. A sender that speaks or ends its stream meanwhile ends the attempt, and its wait."""
        older = tuple(self._attempts[attempt.claim.handoff_id][:-1])
        granting = asyncio.create_task(self._pages(attempt, older))
        try:
            await asyncio.wait((granting, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                raise out_of_order(reading.result(), "the grant")
            return granting.result()
        finally:
            granting.cancel()
            await settle((granting,))

    async def _pages(self, attempt: Attempt, older: Sequence[Attempt]) -> PageSink:
        claim, deadline = attempt.claim, attempt.deadline
        for each in older:  # its pages may be this one's
            deadline.extend(self._settings.idle_timeout_s, "an older attempt to end")
            await each.over.wait()
        deadline.extend(claim.expires_at - self._book.clock(), "pages, until the ticket expired")
        return await self._host.grant(claim)

    async def _next(
        self, stream: ReceiverStream, deadline: Deadline, what: str, begun: Awaitable[Request | None] | None = None
    ) -> Request | None:
        deadline.extend(self._settings.idle_timeout_s, what)
        return await (begun or stream.read())

    def _forget(self, attempt: Attempt) -> None:
        running = self._attempts[attempt.claim.handoff_id]
        running.remove(attempt)
        if not running:
            del self._attempts[attempt.claim.handoff_id]
