"""The queue in shared memory: what either side may say there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import threading
from collections.abc import Callable

import pytest

from cache_transfer import shared_queue
from cache_transfer.digests import frame_digest, logits_digest, memory_proof
from cache_transfer.messages import Commit, Grant, Logits, Queued, SharedMemory, Unpacked
from cache_transfer.opening import make_opening
from cache_transfer.shared import Ring, Shared
from cache_transfer.shared_queue import ENTRY_BYTES, START
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.v1 import transfer_pb2 as pb
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair, check_same, logits_of, make_pair, random_cache
from tests.cache_transfer.test_shared_memory import SECRET, header

pytestmark = pytest.mark.usefixtures("no_shared_memory_is_left")

TOKENS = 9
ENTRIES = 4
SIZE = 16384
PAYLOADS = START + ENTRIES * ENTRY_BYTES
ANNOUNCED = 64  # bytes, as docs/protocol.md says it


class ByHand:
    """A sender's memory and stream with nothing of our sender in it."""

    def __init__(self, pair: Pair, *, logits_only: bool = False) -> None:
        self.pair, self.logits_only = pair, logits_only
        self.ticket, self.identity = pair.issue(TOKENS, logits_only=logits_only)
        self.fd = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(self.fd, memory_proof(self.ticket.secret, SIZE), 0)
        self.offer = SharedMemory(os.getpid(), self.fd, SIZE, ENTRIES)

    async def open(self) -> Grant:
        self.stream = self.pair.transport.open(WAIT_S)
        of = self.ticket, self.identity, self.pair.sends
        opening = make_opening(*of, logits_only=self.logits_only, shared=self.offer)
        await self.stream.send(opening)
        async with asyncio.timeout(WAIT_S):
            grant = await self.stream.receive()
        assert isinstance(grant, Grant)
        return grant

    def entry(self, number: int, data: bytes) -> None:
        os.pwrite(self.fd, data, START + number % ENTRIES * ENTRY_BYTES)

    def frame(self, number: int, payload: bytes = bytes(48), **changes: int) -> bytes:
        """The entry of one token of layer 0's keys, whose payload lies behind the entries."""
        at = PAYLOADS + 64 * number
        os.pwrite(self.fd, payload, at)
        digest = frame_digest(self.ticket.secret, header(1), payload)
        entry = pb.SharedFrame(header=header(1), digest=digest, offset=at, size=len(payload))
        for name, value in changes.items():
            setattr(entry, name, value)
        return entry.SerializeToString()

    def announce(self, frames: int) -> None:
        os.pwrite(self.fd, struct.pack("<Q", frames), ANNOUNCED)

    async def refused(self) -> PdserveError:
        with pytest.raises(PdserveError) as caught:
            async with asyncio.timeout(WAIT_S):
                while await self.stream.receive() is not None:
                    pass
        return caught.value

    async def close(self) -> None:
        await self.stream.close()
        os.close(self.fd)


def sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def changed(it: ByHand, number: int) -> bytes:
    """A frame whose payload is another by the time that it is read."""
    entry = it.frame(number)
    os.pwrite(it.fd, b"x", PAYLOADS + 64 * number)
    return sized(entry)


HOSTILE: dict[str, tuple[tuple[Callable[[ByHand, int], bytes], ...], int, str]] = {
    # entries, how many are announced, reason
    "more frames than entries": ((), ENTRIES + 1, "SHARED_RANGE"),
    "more frames than there are numbers": ((), 2**64 - 1, "SHARED_RANGE"),
    "an entry of zeros": ((), 1, "MALFORMED_MESSAGE"),
    "an entry that is not protobuf": ((lambda it, n: sized(b"\xff" * 40),), 1, "MALFORMED_MESSAGE"),
    "an entry larger than its place": (
        (lambda it, n: struct.pack("<I", 2**32 - 1) + b"\xff" * 508,),
        1,
        "MALFORMED_MESSAGE",
    ),
    "a payload beyond the memory": ((lambda it, n: sized(it.frame(n, offset=SIZE - 8)),), 1, "SHARED_RANGE"),
    "a payload of another size": ((lambda it, n: sized(it.frame(n, size=96)),), 1, "FRAME_DIGEST"),
    "a payload that changed": ((changed,), 1, "FRAME_DIGEST"),
    "the same frame twice": ((lambda it, n: sized(it.frame(n)),) * 2, 2, "FRAME_SEQUENCE"),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_queue_is_refused(case: tuple[tuple[Callable[[ByHand, int], bytes], ...], int, str]) -> None:
    entries, announced, reason = case
    async with make_pair("grpc") as pair:
        it = ByHand(pair)
        assert (await it.open()).queue
        for number, make in enumerate(entries):
            it.entry(number, make(it, number))
        it.announce(announced)
        await it.stream.send(Queued(1))
        assert (await it.refused()).reason == reason
        await it.close()
        assert all(sink.writes <= announced - 1 for sink in pair.host.sinks.values())
        await pair.check_next_handoff_works()


async def test_a_frame_after_all_that_was_granted_is_refused() -> None:
    """At once: it does not wait in the queue for somebody to look at it."""
    async with make_pair("grpc") as pair:
        it = ByHand(pair, logits_only=True)  # nothing is to come
        assert (await it.open()).queue
        it.entry(0, sized(it.frame(0)))
        it.announce(1)
        await it.stream.send(Queued(1))
        assert (await it.refused()).reason == "FRAME_TOKENS"
        await it.close()
        await pair.check_next_handoff_works()


async def test_a_counter_that_goes_back_is_refused() -> None:
    async with make_pair("grpc") as pair:
        it = ByHand(pair)
        await it.open()
        it.entry(0, sized(it.frame(0)))
        it.announce(1)
        await it.stream.send(Queued(1))
        await asyncio.to_thread(wait_until, lambda: any(sink.writes for sink in pair.host.sinks.values()))
        it.announce(0)
        await it.stream.send(Queued(0))
        assert (await it.refused()).reason == "SHARED_RANGE"
        await it.close()
        await pair.check_next_handoff_works()


async def test_a_wake_without_frames_does_no_harm_and_a_commit_without_them_is_refused() -> None:
    async with make_pair("grpc") as pair:
        it = ByHand(pair)
        await it.open()
        await it.stream.send(Queued(7))
        dtype, data = logits_of(pair.sends)
        await it.stream.send(Logits(dtype, data, 8, logits_digest(it.ticket.secret, dtype, 8, data)))
        await it.stream.send(Commit(0, 0, 0, TOKENS, bytes(32)))
        assert (await it.refused()).reason == "FRAMES_MISSING"
        await it.close()
        await pair.check_next_handoff_works()


@pytest.mark.parametrize("entries", [9 * ENTRIES, 257, 2**32 - 1])
def test_more_entries_than_the_memory_holds_are_refused(entries: int) -> None:
    fd = os.memfd_create("by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, memory_proof(SECRET, SIZE), 0)
        with pytest.raises(ValueError, match="entries"):
            Shared.open(SharedMemory(os.getpid(), fd, SIZE, entries), SECRET)
    finally:
        os.close(fd)


async def test_frames_in_messages_are_out_of_order_once_the_queue_was_agreed() -> None:
    async with make_pair("grpc") as pair:
        it = ByHand(pair)
        await it.open()
        frame = Unpacked(header(1), 48, lambda out: out.__setitem__(slice(None), bytes(48)))
        await it.stream.send(pair.transport.pack([frame], it.ticket.secret))
        assert (await it.refused()).reason == "MESSAGE_ORDER"
        await it.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_queued_without_an_agreement_is_out_of_order(shared: bool) -> None:
    async with make_pair("grpc") as pair:
        it = ByHand(pair)
        it.offer = SharedMemory(os.getpid(), it.fd, SIZE if shared else 1)
        grant = await it.open()
        assert (grant.shared, grant.queue) == (shared, False)
        await it.stream.send(Queued(1))
        assert (await it.refused()).reason == "MESSAGE_ORDER"
        await it.close()


async def test_a_receiver_that_knows_no_queue_gets_frames_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an earlier version: it agrees to the memory, and does not see the entries."""
    opened = Shared.open
    monkeypatch.setattr(
        Shared, "open", lambda offer, secret: opened(SharedMemory(offer.pid, offer.fd, offer.size), secret)
    )
    async with make_pair("shared") as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS))
        pair.announce_all(sender, TOKENS)
        await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), random_cache(pair.sends, TOKENS))


@pytest.mark.parametrize("done", [1, 2**63])
async def test_a_receiver_that_is_done_with_more_than_was_sent_ends_the_handoff(done: int) -> None:
    """Else it would be handed slots that it has not read."""
    ring = Ring(4096)
    try:
        assert ring.begin(SECRET, 4096, 4096)
        os.pwrite(ring.offer.fd, struct.pack("<Q", done), 8 * shared_queue.DONE)
        with pytest.raises(InvalidRequest) as caught:
            ring.has_room()
        assert caught.value.reason == "SHARED_RANGE"
    finally:
        ring.close()


def wait_until(condition: Callable[[], bool]) -> None:
    wake = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        wake.wait(0.01)
    raise TimeoutError
