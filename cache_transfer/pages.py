"""What the transfer asks of a worker's memory. Workers implement these; tests do too.

All ranges are half open. The canonical payload of (plane, layer, heads [h0, h1), tokens
[t0, t1)) is [t1-t0, h1-h0, head_dim], little endian, in logical token order. Token numbers
are positions in the sequence, never slots of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

Range = tuple[int, int]


class KVSource(Protocol):
    """A sender's view of one sequence's cache. Must stay unchanged until the handoff ends."""

    def read(self, plane: str, layer: int, heads: Range, tokens: Range) -> Sequence[memoryview]:
        """Pieces whose concatenation is the canonical payload. No copy where the layout allows.

        Called from a worker thread; only for ranges already announced as computed.
        """
        ...


@runtime_checkable
class DirectSource(KVSource, Protocol):
    """A source that can also write a payload where it is needed, which saves a copy when the
    layout does not hold the range in canonical order."""

    def read_into(self, plane: str, layer: int, heads: Range, tokens: Range, out: memoryview) -> None:
        """Writes the canonical payload into `out`, whose size is the payload's.

        Called like `read`. Must not keep `out` or a view of it.
        """
        ...


class PageSink(Protocol):
    """A receiver's granted pages for tokens [start, end) of one sequence."""

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        """Copies a canonical payload, in the sender's dtype, into the granted pages.

        Called from a worker thread, never twice for the same range, never after the attempt
        was revoked and its writers drained. The payload is only valid during the call.
        """
        ...
