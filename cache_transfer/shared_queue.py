"""Which payloads lie in shared memory, told from thread to thread, past both event loops.

    page 0    the memory digest, then words of 8 bytes, 64 bytes apart
    entries   of ENTRY_BYTES each: u32 size, then the bytes of a SharedFrame message
    payloads

                     the sender's thread                    the receiver's thread
    put, `announced` + 1      ------------------------------->  get, verify, write
                              <-------------------------------  `done` + 1

Who finds nothing to do looks on for LOOK_S, says so in a word of its own, looks again, and waits: first a little on the
other's counter (futex.py), where the other's thread wakes it; then its thread ends, and the other's event loop wakes it
by a message on the stream (Queued or Release). Between a write and the look that answers it there is a fence on both
sides, so of two that meet at least one sees the other. A waiting word is never the same twice, so each wait is ended
once.

Neither side trusts the other's counters: what they cannot be is SHARED_RANGE, and an entry is copied before it is read.
"""

from __future__ import annotations

import struct
import threading
import time

from cache_transfer.futex import Word
from cache_transfer.messages import SharedFrame
from cache_transfer.push import decode_shared_frame, encode_shared_frame
from pdserve.errors import Internal, InvalidRequest

START = 4096  # of the entries
ENTRY_BYTES = 512  # a header has at most 256
MAX_ENTRIES = 256
LOOK_S = 40e-6  # what a thread looks at the other's counter before it waits
LINGER_S = 0.002  # what a thread waits on the other's before it ends

# Where the words are, in words. The sender writes the first three.
ANNOUNCED, SENDER_WAITS, WANTED, DONE, RECEIVER_WAITS = 8, 16, 24, 32, 40
RUNS, LINGERS, SLEEPS = 0, 1, 2  # the low two bits of *_WAITS; above them the number of changes
_SIZE = struct.Struct("<I")


class Queue:
    """One side's view of the queue. One thread of each side uses it at a time.

    Args:
        memory: from the start of the shared memory, with all entries.
        waits, counts: which word this side says it waits in, and the other's counter that it waits for.
    """

    def __init__(self, memory: memoryview, entries: int, waits: int, counts: int) -> None:
        self._words = memory[:START].cast("Q")
        self._entries = memory[START : START + entries * ENTRY_BYTES]
        self._count = entries
        self._waits, self._counts = waits, counts
        self._other_waits = SENDER_WAITS + RECEIVER_WAITS - waits
        self._linger_on = Word(memory, counts)
        self._wake_at = Word(memory, ANNOUNCED + DONE - counts)
        self._seen = 0  # the other side's counter, when last read
        self._changes = 0  # of this side's waiting
        self._woken = RUNS  # the other's waiting word that was answered last
        self._lock = threading.Lock()

    # -- the sender ------------------------------------------------------------------------------

    @classmethod
    def of_sender(cls, memory: memoryview, entries: int) -> Queue:
        return cls(memory, entries, SENDER_WAITS, DONE)

    def begin(self) -> None:
        """Nothing is announced, nobody waits, and the receiver is to be woken. Before the memory is offered."""
        for word in (ANNOUNCED, SENDER_WAITS, WANTED, DONE):
            self._words[word] = 0
        self._words[RECEIVER_WAITS] = SLEEPS
        self._seen = self._changes = self._woken = 0

    def put(self, number: int, frame: SharedFrame) -> bool:
        """Announces frame `number`, for which there is room. Whether the receiver needs a message to wake."""
        data = encode_shared_frame(frame)
        if len(data) > ENTRY_BYTES - _SIZE.size:
            raise Internal(f"an entry of {len(data)} bytes")
        at = number % self._count * ENTRY_BYTES
        self._entries[at : at + _SIZE.size + len(data)] = _SIZE.pack(len(data)) + data
        self._words[ANNOUNCED] = number + 1
        return self._wake()

    def done(self, announced: int) -> int:
        """Frames that the receiver is done with. Raises InvalidRequest (SHARED_RANGE) for what it cannot be."""
        return self._read(self._seen, announced)

    def want(self, done: int) -> None:
        """For how many done frames the sender will wait."""
        self._words[WANTED] = done

    # -- the receiver ----------------------------------------------------------------------------

    @classmethod
    def of_receiver(cls, memory: memoryview, entries: int) -> Queue:
        return cls(memory, entries, RECEIVER_WAITS, ANNOUNCED)

    def announced(self, done: int) -> int:
        """Frames that stand in the queue or have. Raises InvalidRequest (SHARED_RANGE) for what it cannot be."""
        return self._read(max(done, self._seen), done + self._count)

    def get(self, number: int) -> SharedFrame:
        """The entry of frame `number`. Raises InvalidRequest (MALFORMED_MESSAGE)."""
        at = number % self._count * ENTRY_BYTES
        entry = bytes(self._entries[at : at + ENTRY_BYTES])
        (size,) = _SIZE.unpack_from(entry)
        return decode_shared_frame(entry[_SIZE.size : _SIZE.size + min(size, ENTRY_BYTES)])

    def finish(self, done: int) -> bool:
        """The first `done` frames are written. Whether the sender needs a message to wake."""
        self._words[DONE] = done
        self._fence()
        return self._words[WANTED] <= done and self._wake()

    # -- both ------------------------------------------------------------------------------------

    def waits(self, how: int) -> None:
        """This side LINGERS or SLEEPS from now on, unless a look after this says otherwise; or RUNS again."""
        self._changes += 1
        self._words[self._waits] = self._changes << 2 | how
        self._fence()

    def look(self) -> bool:
        """Whether the other's counter changes within LOOK_S, which costs nobody a call."""
        until = time.perf_counter() + LOOK_S
        while self._words[self._counts] == self._seen:
            if time.perf_counter() > until:
                return False
        return True

    def linger(self) -> None:
        """Returns when the other's counter is not what it was when last read, or after LINGER_S."""
        self._linger_on.wait(self._seen, LINGER_S)

    def close(self) -> None:
        """Gives the views of the memory back. Idempotent."""
        self._linger_on.close()
        self._wake_at.close()
        self._words.release()
        self._entries.release()

    def _wake(self) -> bool:
        """Ends the other's wait, or says that a message must."""
        self._fence()
        waits = self._words[self._other_waits]
        if waits & 3 == RUNS or waits == self._woken:
            return False
        self._woken = waits
        if waits & 3 == LINGERS:
            self._wake_at.wake()
            return False
        return True

    def _read(self, low: int, high: int) -> int:
        found = self._words[self._counts]
        if not low <= found <= high:
            raise InvalidRequest(
                f"a counter of the queue says {found}, it can be {low} to {high}",
                reason="SHARED_RANGE",
                field="shared.entries",
                remedy="count up only, by as many entries as are written or read",
            )
        self._seen = found
        return found

    def _fence(self) -> None:
        """Everything written before is seen before anything read after: a lock is taken and given back."""
        with self._lock:
            pass
