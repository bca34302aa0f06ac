"""Waiting for a word of shared memory to change, between threads of two processes, past their event loops.

Python has no name for it, so the system call is made by number, on machines where that is known. Elsewhere `wait`
returns at once, and whoever waited is woken in the slower way.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_NUMBER = 202 if sys.platform == "linux" and platform.machine() == "x86_64" else 0
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """The low 32 bits of a word of 8 bytes in a shared mapping. `close` it before the mapping.

    Args:
        memory: writable, of little-endian words.
        at: its index.
    """

    def __init__(self, memory: memoryview, at: int) -> None:
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(memory, 8 * at)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = ctypes.CDLL(None).syscall if _NUMBER else None

    def wait(self, value: int, seconds: float) -> None:
        """Returns when it was woken, after `seconds`, or at once when the word is not `value`. Never raises."""
        if self._call is not None:
            limit = _Time(0, int(seconds * 1e9))
            expected = ctypes.c_uint32(value & 0xFFFFFFFF)
            self._call(ctypes.c_long(_NUMBER), self._address, _WAIT, expected, ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        if self._call is not None:
            self._call(ctypes.c_long(_NUMBER), self._address, _WAKE, _ALL, None, None, 0)

    def close(self) -> None:
        """Idempotent."""
        self._word = None
