"""Which payloads lie in shared memory, told from thread to thread, past both event loops.

    page 0    the memory digest, then four counters of 8 bytes, 64 bytes apart
    entries   of ENTRY_BYTES each: u32 size, then the bytes of a SharedFrame message
    payloads

                      the sender's thread                    the receiver's thread
    put, announced + 1          ------------------------------->  get, verify, write
                                <-------------------------------  done + 1
    nothing free: `wanted` = the number of done frames            nothing there: `idle` = 1
    that it waits for, looks again, ends                          looks again, ends

Whoever counts up looks whether the other has ended, and if so wakes it with a message on the stream (Queued or
Release). Between a write and a look that answers it there is a fence on both sides, so of two that meet at least one
sees the other, and nobody sleeps for good.

Neither side trusts the other's counters: what they cannot be is SHARED_RANGE, and an entry is copied before it is read.
"""

from __future__ import annotations

import struct
import threading

from cache_transfer.messages import SharedFrame
from cache_transfer.push import decode_shared_frame, encode_shared_frame
from pdserve.errors import Internal, InvalidRequest

START = 4096  # of the entries
ENTRY_BYTES = 512  # a header has at most 256
MAX_ENTRIES = 256

_ANNOUNCED, _DONE, _IDLE, _WANTED = 8, 16, 24, 32  # in words of 8 bytes
_SIZE = struct.Struct("<I")


class Queue:
    """One side's view of the queue. One thread of each side uses it at a time.

    Args:
        memory: from the start of the shared memory, with all entries.
    """

    def __init__(self, memory: memoryview, entries: int) -> None:
        self._words = memory[:START].cast("Q")
        self._entries = memory[START : START + entries * ENTRY_BYTES]
        self._count = entries
        self._seen = 0  # the other side's counter, when last read
        self._lock = threading.Lock()

    # -- the sender ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is announced, nobody waits, and the receiver is to be woken. Before the memory is offered."""
        self._words[_ANNOUNCED] = self._words[_DONE] = self._words[_WANTED] = self._seen = 0
        self._words[_IDLE] = 1

    def put(self, number: int, frame: SharedFrame) -> bool:
        """Announces frame `number`, for which there is room. Whether the receiver must be woken."""
        data = encode_shared_frame(frame)
        if len(data) > ENTRY_BYTES - _SIZE.size:
            raise Internal(f"an entry of {len(data)} bytes")
        at = number % self._count * ENTRY_BYTES
        self._entries[at : at + _SIZE.size + len(data)] = _SIZE.pack(len(data)) + data
        self._words[_ANNOUNCED] = number + 1
        self._fence()
        if not self._words[_IDLE]:
            return False
        self._words[_IDLE] = 0
        return True

    def done(self, announced: int) -> int:
        """Frames that the receiver is done with. Raises InvalidRequest (SHARED_RANGE) for what it cannot be."""
        return self._read(_DONE, self._seen, announced)

    def want(self, done: int) -> None:
        """The sender ends, and is to be woken when so many frames are done; 0: it runs again."""
        self._words[_WANTED] = done
        self._fence()

    # -- the receiver ----------------------------------------------------------------------------

    def announced(self, done: int) -> int:
        """Frames that stand in the queue or have. Raises InvalidRequest (SHARED_RANGE) for what it cannot be."""
        return self._read(_ANNOUNCED, max(done, self._seen), done + self._count)

    def get(self, number: int) -> SharedFrame:
        """The entry of frame `number`. Raises InvalidRequest (MALFORMED_MESSAGE)."""
        at = number % self._count * ENTRY_BYTES
        entry = bytes(self._entries[at : at + ENTRY_BYTES])
        (size,) = _SIZE.unpack_from(entry)
        return decode_shared_frame(entry[_SIZE.size : _SIZE.size + min(size, ENTRY_BYTES)])

    def finish(self, done: int) -> int:
        """The first `done` frames are written. For how many of them the sender waits; 0: it does not, or for more."""
        self._words[_DONE] = done
        self._fence()
        wanted = self._words[_WANTED]
        return wanted if wanted <= done else 0

    def idle(self, idle: bool) -> None:
        """The receiver ends, and is to be woken when there is more; or it runs again."""
        self._words[_IDLE] = idle
        self._fence()

    def _read(self, word: int, low: int, high: int) -> int:
        found = self._words[word]
        if not low <= found <= high:
            raise InvalidRequest(
                f"a counter of the queue says {found}, it can be {low} to {high}",
                reason="SHARED_RANGE",
                field="shared.entries",
            )
        self._seen = found
        return found

    def _fence(self) -> None:
        """Everything written before is seen before anything read after: a lock is taken and given back."""
        with self._lock:
            pass

    def close(self) -> None:
        """Gives the views of the memory back. Idempotent."""
        self._words.release()
        self._entries.release()
