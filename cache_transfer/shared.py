"""Payloads through memory of the sender, where the receiver runs on the same machine.

Payloads take this way, and with a queue (shared_queue.py) the frames' headers and digests too. Logits, commit and every
answer stay on the stream, and the receiver alone writes pages. The memory is a ring of slots:

    free --filled and hashed--> announced --copied, verified, written--> free

The sender makes it (an anonymous file, sealed so that it can never shrink, gone with its last
descriptor whoever dies) and offers it in `open`; the receiver looks at it and says in the grant
whether it will use it. The receiver copies a payload out first, and looks at nothing but its copy from then on:
the sender can change the slot at any time, but not what was verified. Since the file cannot shrink, no access fails.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import platform
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cache_transfer.contract import Endpoint
from cache_transfer.digests import DIGEST_BYTES, frame_digest, memory_proof, same
from cache_transfer.messages import SharedFrame, SharedMemory, Unpacked
from cache_transfer.shared_queue import ENTRY_BYTES, MAX_ENTRIES, START, Queue
from pdserve.errors import Internal, InvalidRequest

log = logging.getLogger(__name__)

TRANSPORT = "shm"

_PAGE = mmap.PAGESIZE
_RING_BYTES = 4 << 20  # more would leave the processors' caches
_MAX_SLOTS = 64  # and entries of the queue
_PAYLOADS = -(-(START + _MAX_SLOTS * ENTRY_BYTES) // _PAGE) * _PAGE  # where they begin


@cache
def boot_id() -> str:
    """Names this machine until it restarts; empty where it has no such name, or no anonymous files.

    And where one core may see another's writes in another order than they were made: the queue (shared_queue.py) counts
    on that order, which x86-64 keeps. There payloads go over gRPC.
    """
    if platform.machine() != "x86_64":
        return ""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() if hasattr(os, "memfd_create") else ""
    except OSError:
        return ""


def endpoints_of(address: str, shared_memory: str) -> tuple[Endpoint, ...]:
    """What a ticket names for a Transfer listener at `address`.

    Args:
        shared_memory: `auto`, or `off`: no sender will offer any.
    """
    shared = (Endpoint(boot_id(), TRANSPORT),) if shared_memory == "auto" and boot_id() else ()
    return (Endpoint(address), *shared)


def on_this_machine(endpoints: Iterable[Endpoint]) -> bool:
    """Whether a receiver with these endpoints could read this process's memory."""
    return any(each.transport == TRANSPORT and each.address == boot_id() for each in endpoints)


class Ring:
    """The sender's memory, for one handoff at a time. `close` it when nothing fills it any more.

    Frame n of its stream has slot n modulo `slots`, so it is packed when frame n - `slots` is done. Used by one
    thread at a time.
    """

    def __init__(self, largest_payload: int, whole: int = _RING_BYTES) -> None:
        """Raises OSError where the system gives no memory.

        Args:
            whole: bytes of all payloads that will come.
        """
        slot_bytes = -(-largest_payload // _PAGE) * _PAGE
        slots = _slots(min(_RING_BYTES, whole), slot_bytes)
        self._size = _PAYLOADS + slots * slot_bytes
        self._fd = os.memfd_create("pdserve-handoff", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, self._size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            # All pages at once: one by one, as they are first written, they took longer than hashing what they hold.
            memory = mmap.mmap(self._fd, self._size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._memory: memoryview | None = memoryview(memory)
        except OSError:
            os.close(self._fd)
            raise
        self.queue = Queue.of_sender(self._memory, _MAX_SLOTS)
        self.slots = self.packed = 0
        self.offer = SharedMemory(os.getpid(), self._fd, self._size, _MAX_SLOTS)

    def begin(self, secret: bytes, largest_payload: int, whole: int) -> bool:
        """Makes it ready for a handoff with a ticket of `secret`, if it is large enough for that."""
        self._slot_bytes = -(-largest_payload // _PAGE) * _PAGE
        self.slots = min(_MAX_SLOTS, (self._size - _PAYLOADS) // self._slot_bytes)
        if self._memory is None or self.slots < _slots(min(_RING_BYTES // 2, whole), self._slot_bytes):
            return False
        self.packed = 0
        self.queue.begin()
        self._memory[:DIGEST_BYTES] = memory_proof(secret, self._size)
        return True

    def has_room(self) -> bool:
        """Whether the next frame may be packed. Raises what `Queue.done` raises."""
        return self.packed - self.queue.done(self.packed) < self.slots

    def put(self, frame: Unpacked, secret: bytes) -> tuple[SharedFrame, bool]:
        """Packs the next frame, for which there is room, and announces it. Whether the receiver must be woken."""
        size = frame.payload_bytes
        if self._memory is None or size > self._slot_bytes:
            raise Internal(f"no slot for a frame of {size} bytes")
        offset = _PAYLOADS + self.packed % self.slots * self._slot_bytes
        payload = self._memory[offset : offset + size]
        frame.fill(payload)
        placed = SharedFrame(frame.header, offset, size, frame_digest(secret, frame.header, payload))
        wake = self.queue.put(self.packed, placed)
        self.packed += 1
        return placed, wake

    def close(self) -> None:
        """The memory goes when the receiver has closed it, too. Idempotent."""
        if self._memory is not None:
            self.queue.close()
            self._memory = None  # unmapped with its last view
            os.close(self._fd)


def _slots(size: int, slot_bytes: int) -> int:
    return max(2, min(_MAX_SLOTS, size // slot_bytes))


class Shared:
    """A sender's memory, as its receiver reads it. Threads may read; `close` when none does any more."""

    def __init__(self, memory: mmap.mmap, entries: int) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._size = len(memory)
        self.queue = Queue.of_receiver(self._view, entries) if entries else None

    @classmethod
    def open(cls, offer: SharedMemory, secret: bytes) -> Shared:
        """Raises OSError for what cannot be opened, ValueError for what is not the memory of this ticket's sender.

        Opening by its path alone could wait for ever or have effects (a pipe, a device), so the
        file is looked at first, and read only if it is an anonymous one of the same user.
        """
        path = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_PATH | os.O_CLOEXEC)
        try:
            found = os.fstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ValueError("it is not a file of this user")
            way = os.O_RDWR if offer.entries else os.O_RDONLY  # a queue has counters of the receiver's
            fd = os.open(f"/proc/self/fd/{path}", way | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(path)
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it is not sealed against shrinking")
            if not DIGEST_BYTES <= os.fstat(fd).st_size == offer.size:
                raise ValueError(f"it has not the {offer.size} bytes that were offered")
            if offer.entries and offer.entries > min(MAX_ENTRIES, (offer.size - START) // ENTRY_BYTES):
                raise ValueError(f"it has no room for {offer.entries} entries")
            memory = mmap.mmap(fd, offer.size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if offer.entries else 0))
        finally:
            os.close(fd)
        if not same(memory[:DIGEST_BYTES], memory_proof(secret, offer.size)):
            memory.close()
            raise ValueError("its maker does not hold the ticket's secret")
        return cls(memory, offer.entries)

    def check(self, frame: SharedFrame) -> None:
        """Raises InvalidRequest (SHARED_RANGE) unless the payload lies inside the memory."""
        if not 0 <= frame.offset <= frame.offset + frame.size <= self._size:
            raise InvalidRequest(
                f"{frame.size} bytes at {frame.offset} are not inside the {self._size} that were offered",
                reason="SHARED_RANGE",
                field="shared.offset",
                remedy="keep every payload inside the memory that was offered",
            )

    def read(self, frame: SharedFrame, into: memoryview) -> memoryview:
        """Copies a checked payload to the start of `into`, which is as large or larger; the part that it fills."""
        payload = into[: frame.size]
        payload[:] = self._view[frame.offset : frame.offset + frame.size]
        return payload

    def close(self) -> None:
        """Idempotent. Reading afterwards is a ValueError."""
        if self.queue is not None:
            self.queue.close()
        self._view.release()
        self._memory.close()


def open_offered(offer: SharedMemory | None, secret: bytes) -> Shared | None:
    """The memory that a sender offers; None: payloads come in frames, as they would from another machine."""
    if offer is None:
        return None
    try:
        return Shared.open(offer, secret)
    except (OSError, ValueError) as error:
        log.warning("shared memory of process %d is not used: %s; payloads come over gRPC", offer.pid, error)
        return None
