"""Which frames a sender sends next: announced token ranges, cut to the size of a frame.

Producer: the engine's announcements. Consumer: the sender's pump. Bound: what is announced is
two numbers per layer, and frames are planned in the order of layers, at most one cache's worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cache_transfer.codec import ITEM_BYTES
from cache_transfer.contract import CachePlane, WorkerContract
from cache_transfer.messages import FrameHeader
from cache_transfer.pages import Range
from pdserve.errors import Incompatible, Internal


class Outbox:
    """Plans frames for tokens [start, end) of every layer. Not thread-safe."""

    def __init__(self, contract: WorkerContract, start: int, end: int) -> None:
        self._contract = contract
        self._start, self._end = start, end
        layers = len(contract.planes)
        self._ready = [start] * layers  # computed without a gap up to here
        self._planned = [start] * layers
        self._ahead: list[list[Range]] = [[] for _ in range(layers)]  # announced beyond a gap
        self._frames: deque[tuple[FrameHeader, int]] = deque()
        self._seq = 0

    def sizes(self, max_payload_bytes: int) -> tuple[int, int]:
        """Payload bytes: of the largest frame at most, and of all frames together."""
        rows = [plane.heads * plane.head_dim for planes in self._contract.planes for plane in planes]
        row_bytes = self._item_bytes * (self._end - self._start)
        return min(max_payload_bytes, max(rows) * row_bytes), sum(rows) * row_bytes

    @property
    def done(self) -> bool:
        """Whether every frame was taken."""
        return not self._frames and all(token == self._end for token in self._planned)

    def announce(self, layer: int, tokens: Range) -> None:
        """All planes of `layer` are final for `tokens`, in any order; outside [start, end) is ignored.

        Raises Internal for a layer that does not exist.
        """
        if not 0 <= layer < len(self._ready):
            raise Internal(f"layer {layer} was announced, there are {len(self._ready)}", field="layer")
        ahead = self._ahead[layer]
        ahead.append((tokens[0], min(tokens[1], self._end)))
        ahead.sort()
        while ahead and ahead[0][0] <= self._ready[layer]:
            self._ready[layer] = max(self._ready[layer], ahead.pop(0)[1])

    def take(self, max_bytes: int, max_payload_bytes: int) -> list[FrameHeader]:
        """The next frames that can be sent: about `max_bytes` in all, at least one if any.

        Raises Incompatible (FRAME_SIZE) when one row of one head exceeds `max_payload_bytes`.
        """
        self._plan(max_payload_bytes)
        taken: list[FrameHeader] = []
        total = 0
        while self._frames and total < max_bytes:
            header, size = self._frames.popleft()
            taken.append(header)
            total += size
        return taken

    def take_all(self, max_payload_bytes: int) -> list[FrameHeader]:
        """Every frame that can be sent. Raises as `take`."""
        self._plan(max_payload_bytes)
        taken = [header for header, _ in self._frames]
        self._frames.clear()
        return taken

    def _plan(self, max_payload_bytes: int) -> None:
        for layer, planes in enumerate(self._contract.planes):
            tokens = self._planned[layer], self._ready[layer]
            if tokens[0] == tokens[1]:
                continue
            self._planned[layer] = tokens[1]
            for plane in planes:
                for heads, part, size in _cut(plane, tokens, self._item_bytes, max_payload_bytes):
                    header = FrameHeader(plane.name, layer, heads, part, self._seq, self._contract.kv_dtype)
                    self._frames.append((header, size))
                    self._seq += 1

    @property
    def _item_bytes(self) -> int:
        return ITEM_BYTES[self._contract.kv_dtype]


def _cut(plane: CachePlane, tokens: Range, item_bytes: int, max_bytes: int) -> Iterator[tuple[Range, Range, int]]:
    """(heads, tokens, bytes) of frames that cover `tokens`: all heads together where one token fits."""
    row = plane.head_dim * item_bytes
    if row > max_bytes:
        raise Incompatible(
            f"one row of plane {plane.name} has {row} bytes, a frame {max_bytes}",
            reason="FRAME_SIZE",
            field="head_dim",
            remedy="allow larger frames at the decode worker",
        )
    group = min(plane.heads, max_bytes // row)
    step = max_bytes // (group * row)
    for t0 in range(*tokens, step):
        t1 = min(t0 + step, tokens[1])
        for h0 in range(0, plane.heads, group):
            h1 = min(h0 + group, plane.heads)
            yield (h0, h1), (t0, t1), (t1 - t0) * (h1 - h0) * row
