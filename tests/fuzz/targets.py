"""What is fuzzed: whatever reads bytes that a peer chose. A target returns, or has found a fault.

    header    a frame header                          codec.decode_header
    push      one message of a push                   push.decode_request
    receive   a whole stream, see `messages_of`       Receiver.receive

`receive` takes the part of a sender that holds the ticket, since every digest would else stop
the fuzzer at the first change: with SIGNS set in the first byte each message is signed again
after it was changed. Without it the stream may only be taken as it was made. With EARLY set nothing waits
for the grant. With SHARED set the opening offers memory in which the seed streams' payloads lie.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

from cache_transfer import digests
from cache_transfer.codec import decode_header, encode_header
from cache_transfer.contract import Endpoint, Ticket
from cache_transfer.messages import (
    INTEGRITY,
    Commit,
    Frame,
    Frames,
    Logits,
    PushOpening,
    Queued,
    Request,
    Response,
    SharedFrame,
    SharedFrames,
)
from cache_transfer.pages import PageSink, Range
from cache_transfer.push import decode_request, encode_shared_frame
from cache_transfer.receiver import ReceivedLogits, Receiver, ReceiveReport, ReceiverSettings
from cache_transfer.shared_queue import ANNOUNCED, ENTRY_BYTES, START
from cache_transfer.tickets import Claim, TicketBook
from pdserve.errors import PdserveError
from tests.cache_transfer.support import INCARNATION
from tests.fuzz import handoff
from tests.fuzz.handoff import (
    CONTRACT,
    ENTRIES,
    EXPECTED,
    HANDOFF,
    IDENTITY,
    MAX_PAYLOAD_BYTES,
    MEMORY_BYTES,
    SECRET,
    SHIFT,
    WHOLE,
    Cell,
    memory,
    queue,
)

SIGNS, EARLY, SHARED, QUEUE = 1, 2, 4, 8


class Found(Exception):
    """The code under test did something that it must never do."""


def header(data: bytes) -> None:
    try:
        read = decode_header(data)
    except PdserveError:
        return
    if decode_header(encode_header(read)) != read:
        raise Found(f"{read} does not survive its own encoding")


def push(data: bytes) -> None:
    try:
        read = decode_request(data)
    except PdserveError:
        return
    frames = read.frames if isinstance(read, Frames) else [read] if isinstance(read, Frame) else []
    if sum(len(each.header) + len(each.payload) + len(each.digest) for each in frames) > len(data):
        raise Found("a frame has more bytes than its message")


def messages_of(data: bytes) -> list[bytes]:
    """A length of two bytes, then so many bytes; the last may be shorter than it says."""
    found = []
    while len(data) >= 2:
        (length,) = struct.unpack_from("<H", data)
        found.append(data[2 : 2 + length])
        data = data[2 + length :]
    return found


def joined(messages: list[bytes], flags: int = 0) -> bytes:
    """The input of `receive` that says these messages."""
    return bytes([flags]) + b"".join(struct.pack("<H", len(each)) + each for each in messages)


def receive(data: bytes) -> None:
    flags = data[0] if data else 0
    signs, early, shares, queues = (bool(flags & flag) for flag in (SIGNS, EARLY, SHARED, QUEUE))
    if outcome(messages_of(data[1:]), signs=signs, early=early, shares=shares, queues=queues) is None and early:
        raise Found("a stream that did not wait for its grant was taken")


def outcome(
    messages: list[bytes],
    *,
    signs: bool = False,
    early: bool = False,
    shares: bool = False,
    queues: bool = False,
) -> PdserveError | None:
    """How the receiver answers a stream; None: it was taken. Raises Found for what it must never do."""
    loop, receiver, host = _receiver()
    host.clear()
    stream = _Stream(messages, signs=signs, early=early, shares=shares, queues=queues)
    try:
        loop.run_until_complete(receiver.receive(stream))
    except PdserveError as error:
        host.check(None, receiver)
        return error
    host.check(stream, receiver)
    return None


class _Stream:
    """Args: `queues`: frames of `shared` messages go into a queue instead, of which a message tells."""

    def __init__(self, messages: list[bytes], *, signs: bool, early: bool, shares: bool, queues: bool) -> None:
        self._messages = iter(messages)
        self._queue = queue() if queues else None
        self._queued = 0
        self._offer = self._queue or (memory() if shares else None)
        self._early = early
        self._may_read = asyncio.Event()
        self._may_read.set()
        self.signs = signs
        self.answers: list[Response] = []
        self._manifest = digests.Manifest(SECRET, IDENTITY)
        self._logits = b""

    async def read(self) -> Request | None:
        """The rest of the messages come after the grant."""
        await self._may_read.wait()
        for data in self._messages:
            read = decode_request(data)
            if isinstance(read, PushOpening) and not self.answers and not self._early:
                self._may_read.clear()
            if isinstance(read, PushOpening):
                read = replace(read, shared=self._offer)
            if self.signs:
                read = self._signed(read)
            return self._in_queue(read) if self._queue is not None and isinstance(read, SharedFrames) else read
        return None

    def _in_queue(self, message: SharedFrames) -> Queued:
        """What does not fit overwrites older entries, as a sender might that does not wait."""
        assert self._queue is not None
        for frame in message.frames:
            data = encode_shared_frame(replace(frame, offset=min(frame.offset + SHIFT, 2**64 - 1)))
            entry = (struct.pack("<I", len(data)) + data)[:ENTRY_BYTES]
            os.pwrite(self._queue.fd, entry, START + self._queued % ENTRIES * ENTRY_BYTES)
            self._queued += 1
        os.pwrite(self._queue.fd, struct.pack("<Q", self._queued), 8 * ANNOUNCED)
        return Queued(self._queued)

    async def write(self, message: Response) -> None:
        self.answers.append(message)
        self._may_read.set()

    def _signed(self, message: Request) -> Request:
        match message:
            case PushOpening():
                known = {"handoff_id": HANDOFF, "attempt": 1, "incarnation": INCARNATION, "integrity": INTEGRITY}
                return replace(message, proof=digests.proof(SECRET, message.identity), **known)  # type: ignore[arg-type]
            case Frame():
                return self._signed_frame(message)
            case Frames():
                return Frames(tuple(self._signed_frame(each) for each in message.frames))
            case SharedFrames():
                return SharedFrames(tuple(self._signed_shared(each) for each in message.frames))
            case Queued():
                return message
            case Logits():
                self._logits = digests.logits_digest(SECRET, message.dtype, message.position, message.data)
                return replace(message, digest=self._logits)
            case Commit():
                digest = self._manifest.digest(self._logits, IDENTITY.start, IDENTITY.end)
                return replace(message, digest=digest)

    def _signed_frame(self, frame: Frame) -> Frame:
        digest = digests.frame_digest(SECRET, frame.header, frame.payload)
        self._manifest.add(digest, frame.size)
        return replace(frame, digest=digest)

    def _signed_shared(self, frame: SharedFrame) -> SharedFrame:
        """With the digest of what lies there; unchanged where nothing does."""
        if frame.offset + frame.size > MEMORY_BYTES:
            return frame
        payload = os.pread(memory().fd, frame.size, frame.offset)
        digest = digests.frame_digest(SECRET, frame.header, payload)
        self._manifest.add(digest, frame.size)
        return replace(frame, digest=digest)


class _Host:
    """Hands out one ticket and one sink for each input, and counts what it is told."""

    def __init__(self) -> None:
        self.book = TicketBook(INCARNATION, 60.0, (Endpoint("127.0.0.1:1"),))
        self.cells: dict[Cell, bytes] = {}
        self.granted = self.told = 0
        self.logits: ReceivedLogits | None = None

    def clear(self) -> None:
        self.book.close(HANDOFF)
        self._issue()
        self.cells.clear()
        self.granted = self.told = 0
        self.logits = None

    def _issue(self) -> None:
        """A ticket whose id and secret every input can know."""
        ticket: Ticket = self.book.issue("r", IDENTITY, IDENTITY.start, False)
        entry = self.book._entries.pop(ticket.handoff_id)
        entry.ticket = replace(ticket, handoff_id=HANDOFF, secret=SECRET)
        self.book._entries[HANDOFF] = entry

    async def grant(self, claim: Claim) -> PageSink:
        self.granted += 1
        return self

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        size = len(payload) // ((heads[1] - heads[0]) * (tokens[1] - tokens[0]))
        at = 0
        for token in range(*tokens):
            for head in range(*heads):
                cell = (plane, layer, head, token)
                if cell in self.cells:
                    raise Found(f"{cell} was written twice")
                self.cells[cell] = bytes(payload[at : at + size])
                at += size

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        self.told += 1
        self.logits = logits

    def aborted(self, claim: Claim, error: PdserveError) -> None:
        self.told += 1
        if error.reason == "INTERNAL":
            raise Found(f"an input is answered with {error!r}")

    def check(self, stream: _Stream | None, receiver: Receiver) -> None:
        """`stream`: it was taken to its end."""
        if self.told != self.granted or self.granted > 1:
            raise Found(f"{self.granted} grants, and the host heard of {self.told} ends")
        if receiver.active or receiver._attempts:
            raise Found("an attempt is left behind")
        if (stream is not None) != (self.logits is not None):
            raise Found("verified and acknowledged are not the same")
        outside = [cell for cell in self.cells if cell not in WHOLE]
        if outside:
            raise Found(f"written outside of the grant: {outside[0]}")
        if stream is None:
            return
        if self.cells.keys() != WHOLE:
            raise Found("verified with cells missing")
        if not stream.signs and self.cells != EXPECTED:
            raise Found("verified with other bytes than were signed")


class _Inline(Executor):
    """Runs a job where it is submitted: a fuzzer's inputs must do the same each time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing ever waits here."""


_made: list[tuple[asyncio.AbstractEventLoop, Receiver, _Host]] = []


def _receiver() -> tuple[asyncio.AbstractEventLoop, Receiver, _Host]:
    """One for all inputs: making one takes longer than using it."""
    if not _made:
        host = _Host()
        receiver = Receiver(host.book, CONTRACT, host, ReceiverSettings(max_payload_bytes=MAX_PAYLOAD_BYTES))
        receiver.close()
        receiver._executor = _Inline()  # type: ignore[assignment]
        _made.append((asyncio.new_event_loop(), receiver, host))
    return _made[0]


def close() -> None:
    """Ends what the `receive` target keeps between two inputs."""
    while _made:
        _made.pop()[0].close()
    handoff.forget_memory()


TARGETS: dict[str, Callable[[bytes], None]] = {"header": header, "push": push, "receive": receive}
