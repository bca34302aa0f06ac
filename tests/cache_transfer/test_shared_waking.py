"""Who wakes whom beside the queue in shared memory, and what is kept for the next handoff."""

from __future__ import annotations

import asyncio
import os
import struct
import threading

import pytest

from cache_transfer import shared_queue
from cache_transfer.messages import Release, SharedFrame
from cache_transfer.rings import MAX_IDLE, Rings
from cache_transfer.shared import Ring
from cache_transfer.shared_queue import ENTRY_BYTES, LINGERS, RUNS, SLEEPS, START, Queue
from pdserve.errors import DataLoss, PdserveError
from tests.cache_transfer.pages import WAIT_S
from tests.cache_transfer.support import Pair, check_same, heard, make_pair, random_cache
from tests.cache_transfer.test_shared_memory import SECRET
from tests.cache_transfer.test_shared_queue import ENTRIES, TOKENS, wait_until

pytestmark = pytest.mark.usefixtures("no_shared_memory_is_left")


def sides() -> tuple[Queue, Queue]:
    memory = bytearray(START + ENTRIES * ENTRY_BYTES)
    sender = Queue.of_sender(memoryview(memory), ENTRIES)
    sender.begin()
    return sender, Queue.of_receiver(memoryview(memory), ENTRIES)


FRAME = SharedFrame(b"header", 0, 1, bytes(32))


def test_a_receiver_that_sleeps_is_woken_once_and_one_that_runs_never() -> None:
    sender, receiver = sides()
    assert [sender.put(n, FRAME) for n in range(2)] == [True, False]  # it has not begun
    receiver.waits(RUNS)
    assert not sender.put(2, FRAME)
    assert receiver.announced(0) == 3 and receiver.get(2) == FRAME
    receiver.waits(SLEEPS)
    assert [sender.put(n, FRAME) for n in (3, 4)] == [True, False]
    receiver.waits(RUNS)
    receiver.waits(SLEEPS)  # another time
    assert sender.put(5, FRAME)


def test_a_look_sees_what_comes_and_ends_when_nothing_does() -> None:
    sender, receiver = sides()
    assert not receiver.look()
    sender.put(0, FRAME)
    assert receiver.look() and receiver.announced(0) == 1
    assert not receiver.look()  # that one is known by now
    assert receiver.finish(1) is False and sender.look()


def test_a_sender_that_sleeps_is_woken_when_so_many_are_done_as_it_wants() -> None:
    sender, receiver = sides()
    sender.want(2)
    sender.waits(SLEEPS)
    assert [receiver.finish(done) for done in (1, 2, 3)] == [False, True, False]


def test_one_that_lingers_is_woken_by_the_others_thread() -> None:
    """And not only by its own patience, which is longer than the test."""
    sender, receiver = sides()
    receiver.waits(LINGERS)
    assert receiver.announced(0) == 0
    woken: list[int] = []

    def wait() -> None:
        while not woken:
            receiver.linger()
            woken.extend([1] * receiver.announced(0))

    thread = threading.Thread(target=wait)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_queue, "LINGER_S", 0.9)
        thread.start()
        assert not sender.put(0, FRAME)  # no message is needed
        thread.join(WAIT_S)
    assert woken == [1]


async def test_without_futexes_messages_wake_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_transfer.futex._NUMBER", 0)
    async with make_pair("shared", layers=40) as pair:
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS), max_payload_bytes=16)
        pair.announce_all(sender, TOKENS)
        await sender.run()
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), random_cache(pair.sends, TOKENS))


async def test_a_slow_receiver_is_waited_for() -> None:
    """More frames than slots, and the first is not written before the sender sleeps."""
    async with make_pair("shared", layers=40) as pair:
        pair.host.gated = True
        released = heard(pair, Release)
        ticket, identity = pair.issue(TOKENS)
        sender = pair.sender(ticket, identity, pair.source(TOKENS), max_payload_bytes=16)
        pair.announce_all(sender, TOKENS)
        running = asyncio.create_task(sender.run())
        await asyncio.to_thread(pair.host.writing.wait, WAIT_S)
        await asyncio.to_thread(wait_until, lambda: asleep(sender_ring(sender)))
        pair.host.gate.set()
        await running
        assert released
        check_same(pair.host.sinks[ticket.handoff_id, 1].content(TOKENS), random_cache(pair.sends, TOKENS))


async def test_a_ring_is_kept_for_the_same_receiver_after_an_acknowledgement_only() -> None:
    async with make_pair("shared") as pair:
        rings = pair.transport._rings  # type: ignore[attr-defined]
        await hand_over(pair)
        assert len(rings) == 1
        [idle] = rings._idle
        await hand_over(pair)
        assert rings._idle[0].ring is idle.ring
        another = rings.take("another", SECRET, 4096, 4096)
        assert another is not None and another is not idle.ring
        rings.give_back("another", another, unused=False)
        pair.host.write_error = DataLoss("no", reason="TEST")
        pair.host.gated = True
        pair.host.gate.set()
        with pytest.raises(PdserveError):
            await hand_over(pair)
        pair.host.write_error = None
        assert len(rings) == 0
        await pair.check_next_handoff_works()


async def test_idle_rings_are_few_and_not_kept_for_long() -> None:
    rings = Rings(idle_s=0.05)
    made = [rings.take(str(n), SECRET, 4096, 4096) for n in range(MAX_IDLE + 2)]
    for n, ring in enumerate(made):
        assert ring is not None
        rings.give_back(str(n), ring, unused=True)
    assert len(rings) == MAX_IDLE
    async with asyncio.timeout(WAIT_S):
        while len(rings):
            await asyncio.sleep(0.01)
    rings.close()


async def hand_over(pair: Pair) -> None:
    ticket, identity = pair.issue(TOKENS)
    sender = pair.sender(ticket, identity, pair.source(TOKENS))
    pair.announce_all(sender, TOKENS)
    await sender.run()


def sender_ring(sender: object) -> Ring:
    ring: Ring = sender._ring  # type: ignore[attr-defined]
    return ring


def asleep(ring: Ring) -> bool:
    (word,) = struct.unpack("<Q", os.pread(ring.offer.fd, 8, 8 * shared_queue.SENDER_WAITS))
    return bool(word & 3 == SLEEPS)
