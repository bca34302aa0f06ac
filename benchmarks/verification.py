"""What hashing costs a transfer: a meter around every keyed digest of this process.

Two measures, since hashing runs in threads beside the copying and the sockets:

    CPU     thread CPU time inside the digests of both sides, over the CPU time of both processes
    wall    the same transfer with digests that are not computed (all zero, on both sides), and how
            much sooner it is done

Comparing two digests and adding one to the manifest are not in the meter: 32 bytes a frame.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass

from cache_transfer import digests
from cache_transfer.digests import _Buffer, _keyed

ON, OFF = b"on", b"off"
_SAMPLE = struct.Struct("<dd")


@dataclass(frozen=True)
class Sample:
    """CPU seconds so far: of the whole process, and of its digests."""

    process: float
    hashing: float

    def __sub__(self, other: Sample) -> Sample:
        return Sample(self.process - other.process, self.hashing - other.hashing)

    def __add__(self, other: Sample) -> Sample:
        return Sample(self.process + other.process, self.hashing + other.hashing)

    def pack(self) -> bytes:
        return _SAMPLE.pack(self.process, self.hashing)

    @classmethod
    def unpack(cls, data: bytes) -> Sample:
        return cls(*_SAMPLE.unpack(data))


class Meter:
    """Takes the place of the keyed digest once `set` was called; one per process."""

    def __init__(self) -> None:
        self._hashing = 0.0
        self._computes = True
        self._lock = threading.Lock()

    def set(self, mode: bytes) -> None:
        """ON: computed and metered; OFF: 32 zero bytes."""
        self._computes = mode == ON
        digests._keyed = self._digest

    def remove(self) -> None:
        """Everything is as before the first `set`."""
        digests._keyed = _keyed

    def sample(self) -> Sample:
        with self._lock:
            return Sample(time.process_time(), self._hashing)

    def _digest(self, secret: bytes, tag: bytes, *parts: _Buffer) -> bytes:
        if not self._computes:
            return bytes(digests.DIGEST_BYTES)
        began = time.thread_time()
        digest = _keyed(secret, tag, *parts)
        spent = time.thread_time() - began
        with self._lock:
            self._hashing += spent
        return digest
