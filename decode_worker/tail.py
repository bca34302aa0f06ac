"""The end of a split prompt, computed while its beginning arrives. No torch; `advance` runs in the engine's thread.

    prefill worker   ... layer 3 | layer 4 | layer 5   of the beginning's last chunk
    on the way                     layer 3 | layer 4 ...
    here                                     layer 3 | layer 4 ...   of the end

In each layer the end reads the beginning's keys and values, so a layer may run once every byte of it was verified and
written. A token is given out only after the whole handoff was verified; until then all of this is a guess that the
handoff will succeed. A sequence has a tail from the grant of its pages on; without one (its attempt failed, it was
preempted, the boundary is inside a page) it computes the end of its prompt like any other, once the beginning is here.

A step holds the pages that its tail works on itself, under `owner`: whoever ends the sequence need not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_transfer.contract import CachePlane
from cache_transfer.pages import PageSink, Range
from decode_worker.sequence import FirstLogits
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.rate import Span
from pdserve.rpc.events import Prefilled

if TYPE_CHECKING:
    from pdserve.engine.engine import Engine
    from pdserve.engine.layered import LayeredStep


class Arrivals:
    """Counts what a handoff has brought of each layer. Receiver's threads write, the event loop reads.

    Args:
        planes: of each layer.
        tokens: that the handoff brings.
        tell: called in those threads when there is another whole layer.
    """

    def __init__(self, planes: Sequence[Sequence[CachePlane]], tokens: int, tell: Callable[[], object]) -> None:
        self._missing = [sum(plane.heads for plane in layer) * tokens for layer in planes]  # rows
        self._tell = tell
        self._lock = threading.Lock()
        self.layers = 0
        """All before this one are whole."""
        self._count()

    def wrote(self, layer: int, heads: Range, tokens: Range) -> None:
        with self._lock:
            self._missing[layer] -= (heads[1] - heads[0]) * (tokens[1] - tokens[0])
            more = self._count()
        if more:
            self._tell()

    def _count(self) -> bool:
        before = self.layers
        while self.layers < len(self._missing) and not self._missing[self.layers]:
            self.layers += 1
        return self.layers > before


class CountingSink:
    """A sink whose writes are counted."""

    def __init__(self, sink: PageSink, arrivals: Arrivals) -> None:
        self._sink, self._arrivals = sink, arrivals

    def write(self, plane: str, layer: int, heads: Range, tokens: Range, payload: memoryview) -> None:
        self._sink.write(plane, layer, heads, tokens, payload)
        self._arrivals.wrote(layer, heads, tokens)


@dataclass(eq=False)
class Tail:
    """Event loop, but for `advance` and the times that it sets.

    Args:
        chunk: the end of the prompt, with all pages of the sequence.
        layers: of the model.
        ends_at: monotonic seconds: when its sequence ends at the latest.
    """

    chunk: Chunk
    arrivals: Arrivals
    layers: int
    ends_at: float
    done: int = 0  # layers
    steps: int = 0
    began_at: float = 0.0  # monotonic seconds, of its first step
    ended_at: float = 0.0  # and the end of its last one so far
    spent_s: float = 0.0  # computing, so far
    last_s: float = 0.0  # of that, in its last step
    first: FirstLogits | None = None  # once all layers are done
    _work: LayeredStep | None = None

    @property
    def owner(self) -> str:
        """Name under which a step holds its pages."""
        return f"{self.chunk.key}/tail"

    @property
    def ready(self) -> int:
        """Layers that may run now."""
        return self.arrivals.layers - self.done

    @property
    def remaining(self) -> int:
        """Tokens that would be as much work as its layers left."""
        return -(-len(self.chunk.ids) * (self.layers - self.done) // self.layers)

    def span(self, layers: int) -> Span:
        """A chunk that costs as much as so many layers of this one (rate.py: tokens and pairs, both in proportion)."""
        tokens = len(self.chunk.ids)
        share = max(1, tokens * layers // self.layers)
        return self.chunk.start + (tokens - share) // 2, share

    def account(self, asked_at: float) -> Prefilled:
        """Of a tail that is done; asked for at `asked_at`, monotonic seconds."""
        return Prefilled(
            computed_tokens=len(self.chunk.ids),
            cached_tokens=0,
            queued_ms=1000 * (self.began_at - asked_at),
            prefill_ms=1000 * (self.ended_at - self.began_at),
            chunks=self.steps,
        )

    def advance(self, engine: Engine, layers: int) -> FirstLogits | None:
        """Runs the next layers, whose part of the beginning is here; writes their K and V. The logits after the last.

        Raises what `Engine.step` and `check_written` raise.
        """
        from decode_worker.step import kept_logits  # it reads plans with tails
        from pdserve.engine.checks import check_written

        plan, began = StepPlan((self.chunk,)), time.monotonic()
        try:
            self._work = self._work or engine.begin(plan)
            self._work.advance(self._work.done + layers)
            if self._work.done < self.layers:
                return None
            output = self._work.output()
            check_written(plan, output)
            return kept_logits(output.logits[self.chunk.key][-1])
        finally:
            self.ended_at = time.monotonic()
            self.last_s = self.ended_at - began
            self.spent_s += self.last_s
