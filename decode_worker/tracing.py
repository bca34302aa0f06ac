"""The spans of one request at its decode worker.

    decode               Decode/Generate; below the router's attempt that began it
      queue, compute     where the prompt is computed here
      first token        cache verified .. first token sampled
      stream             first token .. the end

What comes over the Transfer service is below the sender's span: cache_transfer/tracing.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode_worker.sequence import Sequence
from pdserve.errors import PdserveError
from pdserve.registry.records import DECODE
from pdserve.telemetry.context import current, enter, received, update
from pdserve.telemetry.traces import SERVER, Traces


class GenerateTrace:
    """Mutable. `sequence` is set once there is one."""

    def __init__(self, traces: Traces) -> None:
        self.sequence: Sequence | None = None
        self._traces = traces
        self._root = traces.start("decode", current().trace, kind=SERVER)
        update(trace=self._root.context)

    def fail(self, error: PdserveError) -> None:
        self._root.fail(error.reason, error)

    def cancel(self) -> None:
        self._root.set({"pdserve.outcome": "CANCELLED"})

    def end(self) -> None:
        now, sequence = time.monotonic(), self.sequence
        if sequence is not None and self._traces.on:
            self._tell(sequence, now)
        self._root.end(now)

    def _tell(self, sequence: Sequence, now: float) -> None:
        request, below = sequence.request, self._root.context
        outputs = sequence.choices or (sequence,)
        self._root.set(
            {
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "gen_ai.usage.output_tokens": sum(len(each.generation.output) for each in outputs),
                "pdserve.request_id": request.request_id,
                "pdserve.tenant": request.tenant,
                "pdserve.handoff_id": sequence.handoff_id.hex(),
                "pdserve.attempts": sequence.attempts,
            }
        )
        first = min((each.started_at for each in outputs if each.started_at), default=0.0)
        if sequence.here:
            work = sequence.work
            computed = {"pdserve.computed_tokens": work.computed, "pdserve.steps": work.chunks}
            self._traces.record("queue", below, work.asked_at, work.began_at or now)
            self._traces.record("compute", below, work.began_at, first or now, computed)
        self._traces.record("first token", below, sequence.verified_at, first)
        self._traces.record("stream", below, first, now)


@contextmanager
def generating(traces: Traces, worker: str, metadata: Any) -> Iterator[GenerateTrace]:
    """Enters the scope of a Decode/Generate call; however that ends, its spans are told.

    Args:
        metadata: the call's.
    """
    enter(received(metadata, DECODE, worker))
    trace = GenerateTrace(traces)
    try:
        yield trace
    except PdserveError as error:
        trace.fail(error)
        raise
    except asyncio.CancelledError:
        trace.cancel()
        raise
    finally:
        trace.end()
