"""Stop strings in a stream of bytes, across any division into tokens.

The answer ends at the first byte that completes a stop string; if several complete there, the
longest counts. Text before it is released, the stop string and all after it are not. This does
not depend on how the text was divided: bytes are held back while they may be the beginning of a
stop string, and no longer.

Each stop string is followed by its own Knuth-Morris-Pratt automaton, so the work per byte is
constant (amortised) however the strings repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import InvalidRequest


@dataclass(frozen=True)
class StopResult:
    release: bytes  # text that can be shown now
    matched: str | None = None  # the stop string that ended the answer


class _Automaton:
    """How long a beginning of one stop string the bytes so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pattern = text.encode()
        self.state = 0
        self._fallback = [0] * (len(self.pattern) + 1)
        length = 0
        for i in range(1, len(self.pattern)):
            length = self._step(length, self.pattern[i])
            self._fallback[i + 1] = length

    def advance(self, byte: int) -> bool:
        """True when this byte completes the stop string."""
        self.state = self._step(self.state, byte)
        return self.state == len(self.pattern)

    def _step(self, state: int, byte: int) -> int:
        while state and (state == len(self.pattern) or self.pattern[state] != byte):
            state = self._fallback[state]
        return state + 1 if self.pattern[state] == byte else 0


class StopMatcher:
    """State of one output stream; not thread-safe. Holds at most the longest stop string less one byte."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for a stop string that is empty or not valid Unicode."""
        for stop in stops:
            if not _is_unicode(stop) or not stop:
                raise InvalidRequest(
                    f"{stop!r} cannot stop an answer",
                    reason="INVALID_STOP",
                    field="stop",
                    remedy="use strings of at least one character of valid Unicode",
                )
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._held = b""
        self._done = False

    def push(self, text: bytes) -> StopResult:
        """Takes the next bytes; after a match everything further is swallowed."""
        if self._done:
            return StopResult(b"")
        if not self._automata:
            return StopResult(text)
        data = self._held + text
        for position, byte in enumerate(text, start=len(self._held) + 1):
            complete = [automaton for automaton in self._automata if automaton.advance(byte)]
            if complete:
                longest = max(complete, key=lambda automaton: len(automaton.pattern))
                self._done, self._held = True, b""
                return StopResult(data[: position - len(longest.pattern)], longest.text)
        keep = len(data) - max(automaton.state for automaton in self._automata)
        self._held = data[keep:]
        return StopResult(data[:keep])

    def flush(self) -> bytes:
        """No more text comes: what was held back is text after all."""
        held, self._held, self._done = self._held, b"", True
        return held


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
