"""Payloads in shared memory: taken where both sides agree, refused where they are not what was said.

Needs a worker on this machine whose tickets offer it; other workers skip these cases.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_transfer import digests
from pdserve.conformance.bench import Bench, Handoff, expect, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.hostile import FOREIGN, flip_middle
from pdserve.conformance.streams import Draft, wire
from pdserve.v1 import transfer_pb2 as pb

GROUP = "shared memory"
_START = 4096  # payloads, or entries and then payloads, come after the memory digest's page
_ENTRIES, _ENTRY_BYTES, _ANNOUNCED = 256, 512, 64  # of a queue; where the first page says how many there are
_Change = Callable[[list[pb.SharedFrame]], None]


def cases() -> Iterator[Case]:
    yield Case("payloads in shared memory", "good", _good)
    yield Case("frames through the queue in shared memory", "good", _queued)
    yield Case("memory with the digest of another secret", "good", _foreign_memory)
    for name, reason, change in (
        ("a shared payload with a flipped bit", "FRAME_DIGEST", _flipped),
        ("a shared payload beyond the memory", "SHARED_RANGE", lambda frames: setattr(frames[-1], "offset", 1 << 62)),
        ("shared frames in another order", "FRAME_SEQUENCE", lambda frames: frames.append(frames.pop(0))),
        ("a shared message without frames", "MALFORMED_MESSAGE", lambda frames: frames.clear()),
    ):
        yield Case(name, GROUP, lambda bench, r=reason, c=change: _hostile(bench, r, c), hostile=True)  # type: ignore[misc]
    for name, reason, harm in (
        ("a queue that counts more frames than it has entries", "SHARED_RANGE", lambda it: it.announce(_ENTRIES + 1)),
        ("a queue with an entry of zeros", "MALFORMED_MESSAGE", lambda it: it.entry(0, b"")),
        ("a queue with its entries in another order", "FRAME_SEQUENCE", lambda it: it.entry(0, it.entries[1])),
        ("a frame in a message beside the queue", "MESSAGE_ORDER", lambda it: it.messages.insert(1, it.frame)),
    ):
        yield Case(name, GROUP, lambda bench, r=reason, h=harm: _hostile_queue(bench, r, h), hostile=True)  # type: ignore[misc]


def _good(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff() as handoff, _memory(handoff, first) as (draft, messages, _):
        with bench.peer.push(draft.ticket) as push:
            if not bench.granted(push, messages[0], draft).shared:
                skip("the worker does not read the offered memory")
            push.send(*messages[1:])
            push.finish()
            released = 0
            while (answer := push.receive()) is not None and answer.HasField("release"):
                expect(released <= answer.release.frames <= len(draft.frames), f"{answer.release} after {released}")
                released = answer.release.frames
            expect(answer is not None and answer.HasField("ack"), "the stream ended without an acknowledgement")
        handoff.finish(first)


def _hostile(bench: Bench, reason: str, change: _Change) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        with _memory(handoff, bench.other_token(first)) as (draft, messages, shared):
            change(shared)
            messages[1] = pb.PushRequest(shared=pb.SharedFrames(frames=shared)).SerializeToString()
            # What does not agree to the offer finds the message out of order.
            bench.refused(draft.ticket, messages, (reason, "MESSAGE_ORDER"))
        handoff.complete(first, handoff.retry())


@dataclass
class _Queue:
    """A right stream whose frames stand in a queue: `entries` as they were put there; the first as a message, too."""

    fd: int
    draft: Draft
    messages: list[bytes]
    entries: list[bytes]
    frame: bytes

    def entry(self, number: int, data: bytes) -> None:
        os.pwrite(self.fd, struct.pack("<I", len(data)) + data + bytes(64), _START + number * _ENTRY_BYTES)

    def announce(self, frames: int) -> None:
        os.pwrite(self.fd, struct.pack("<Q", frames), _ANNOUNCED)


@contextmanager
def _queue(handoff: Handoff, first: int) -> Iterator[_Queue]:
    with _memory(handoff, first, ahead=_ENTRIES * _ENTRY_BYTES) as (draft, _, shared):
        offer = draft.opening.shared
        offer.entries = min(len(shared), _ENTRIES)
        if len(shared) > _ENTRIES:
            skip(f"the worker's model has {len(shared)} planes")
        sealed = draft.seal()
        queued = pb.PushRequest(queued=pb.Queued(frames=len(shared)))
        frame = sealed[1].SerializeToString()
        entries = [each.SerializeToString() for each in shared]
        it = _Queue(offer.fd, draft, wire([sealed[0], queued, *sealed[-2:]]), entries, frame)
        for number, data in enumerate(entries):
            it.entry(number, data)
        it.announce(len(shared))
        yield it


def _queued(bench: Bench) -> None:
    first = bench.token()
    with bench.handoff() as handoff, _queue(handoff, first) as it:
        with bench.peer.push(it.draft.ticket) as push:
            if not bench.granted(push, it.messages[0], it.draft).queue:
                skip("the worker reads no queue")
            push.send(*it.messages[1:])
            push.finish()
            bench.acknowledged(push, it.draft)
        handoff.finish(first)


def _hostile_queue(bench: Bench, reason: str, harm: Callable[[_Queue], None]) -> None:
    first = bench.token()
    with bench.handoff() as handoff:
        with _queue(handoff, bench.other_token(first)) as it:
            harm(it)
            # What does not agree to the queue finds the message out of order.
            bench.refused(it.draft.ticket, it.messages, (reason, "MESSAGE_ORDER"))
        handoff.complete(first, handoff.retry())


def _foreign_memory(bench: Bench) -> None:
    """No error, but no agreement either: frames then come on the stream."""
    first = bench.token()
    with bench.handoff() as handoff, _memory(handoff, first, FOREIGN) as (draft, messages, _):
        with bench.peer.push(draft.ticket) as push:
            expect(not bench.granted(push, messages[0], draft).shared, "memory of a stranger was agreed to")
            push.send(*draft.messages()[1:])
            push.finish()
            bench.acknowledged(push, draft)
        handoff.finish(first)


def _flipped(frames: list[pb.SharedFrame]) -> None:
    frames[-1].digest = flip_middle(frames[-1].digest)


@contextmanager
def _memory(
    handoff: Handoff, first: int, secret: bytes = b"", ahead: int = 0
) -> Iterator[tuple[Draft, list[bytes], list[pb.SharedFrame]]]:
    """A right stream whose payloads lie in memory of this process: its draft, its messages, its shared frames.

    Args: `ahead`: bytes between the first page and the payloads.
    """
    if not _offered(handoff):
        skip("the worker offers no shared memory on this machine")
    draft = handoff.draft(first)
    frames = [request.frame for request in draft.seal()[1:-2]]
    size = _START + ahead + sum(len(frame.payload) for frame in frames)
    fd = os.memfd_create("conformance", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, digests.memory_proof(secret or draft.ticket.secret, size), 0)
        at, shared = _START + ahead, []
        for frame in frames:
            os.pwrite(fd, frame.payload, at)
            shared.append(pb.SharedFrame(header=frame.header, offset=at, size=len(frame.payload), digest=frame.digest))
            at += len(frame.payload)
        draft.opening.shared.CopyFrom(pb.SharedMemory(pid=os.getpid(), fd=fd, size=size))
        sealed = draft.seal()
        message = pb.PushRequest(shared=pb.SharedFrames(frames=shared))
        yield draft, wire([sealed[0], message, *sealed[-2:]]), shared
    finally:
        os.close(fd)


def _offered(handoff: Handoff) -> bool:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return False
    endpoints = handoff.admission.ticket.endpoints
    return any(each.transport == "shm" and each.address == boot_id for each in endpoints)
