"""Runs a prompt on a worker's engine between its steps, to be compared with another run.

The prompt takes pages of its own, which nobody may find, and gives them back at the end, however
it ends. One prompt at a time: a second one is refused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from pdserve.engine.blocks import BlockManager
from pdserve.engine.dtypes import wide
from pdserve.engine.engine import Engine
from pdserve.engine.observe import Recording, Rows
from pdserve.engine.plan import Chunk, StepOutput, StepPlan
from pdserve.engine.runner import EngineThread
from pdserve.engine.trace import StepTrace
from pdserve.errors import DeadlineExceeded, Exhausted, InvalidRequest, Refused
from pdserve.request import check_token_ids
from pdserve.worker.trace import TracedRows, TracedRun

MAX_TOKENS = 512  # of a traced prompt
MAX_COLUMNS = 4096  # of each row
OWNER = "trace"  # who holds the pages
_LITTLE_ENDIAN = {torch.float32: "<f4", torch.float64: "<f8"}


class Tracer:
    """Event loop only.

    Args:
        allowed: the operator's setting; without it every call is refused.
        limit: tokens that the worker serves.
        step_tokens: of one engine step at most, so that no served prompt waits for longer than it does for others.
        lease_s: seconds that a prompt may hold its pages.
        freed: called when the pages are back.
    """

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        blocks: BlockManager,
        *,
        allowed: bool,
        limit: int,
        step_tokens: int,
        lease_s: float,
        freed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._blocks = blocks
        self._allowed = allowed
        self._limit = min(limit, MAX_TOKENS)
        self._step_tokens = step_tokens
        self._lease_s = lease_s
        self._freed = freed
        self.pages: tuple[int, ...] = ()
        """Held now."""
        self.deadline = 0.0
        """When they go back, in monotonic seconds, once no step writes them."""
        self._work: asyncio.Future[TracedRun] | None = None  # of the prompt that holds the pages

    async def run(self, ids: tuple[int, ...], chunk_tokens: int, count: int) -> TracedRun:
        """Computes the prompt in chunks of at most `chunk_tokens`, other steps in between; keeps `count` columns.

        Raises:
            Refused: TRACE_OFF. Exhausted: TRACE_BUSY, or no pages are free.
            InvalidRequest: no tokens, too many, an id outside the vocabulary, or too many columns.
            DeadlineExceeded: it took longer than a lease.
        """
        self._check(ids, count)
        if self._work is not None:
            raise Exhausted(
                "another prompt is being traced", reason="TRACE_BUSY", remedy="wait for it", retry_after_ms=1000
            )
        self.pages = pages = self._blocks.allocate(OWNER, self._blocks.pages_for(len(ids)))
        self.deadline = time.monotonic() + self._lease_s
        stop = threading.Event()
        self._work = work = asyncio.ensure_future(
            self._compute(ids, pages, min(chunk_tokens or len(ids), self._step_tokens), count, stop.is_set)
        )
        try:
            async with asyncio.timeout(self._lease_s):
                return await asyncio.shield(work)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the prompt was not computed within {self._lease_s:g} s",
                reason="LEASE_ENDED",
                field="prefill.lease_s",
                remedy="ask again when the worker has less to do, compare a shorter prompt, or raise the limit",
                retryable=True,
            ) from None
        finally:
            # Whoever leaves early waits for the step that still writes the pages.
            stop.set()
            if work.done():
                self._release(work)
            else:
                work.add_done_callback(self._release)

    def _release(self, work: asyncio.Future[TracedRun]) -> None:
        if not work.cancelled():
            work.exception()  # was raised to the caller, if it is still there
        self._blocks.release(OWNER)
        self.pages, self._work = (), None
        self._freed()

    async def _compute(
        self, ids: tuple[int, ...], pages: tuple[int, ...], chunk_tokens: int, count: int, cancelled: Callable[[], bool]
    ) -> TracedRun:
        recording = Recording(self._engine)
        output = StepOutput({})
        for start in range(0, len(ids), chunk_tokens):
            chunk = Chunk(OWNER, ids[start : start + chunk_tokens], start, pages)
            output = await self._thread.run(partial(_traced_step, self._engine, recording, chunk, cancelled))
        return await self._thread.run(partial(_finish, recording, ids, output, count))

    def _check(self, ids: tuple[int, ...], count: int) -> None:
        if not self._allowed:
            raise Refused(
                "this worker does not show its tensors",
                reason="TRACE_OFF",
                field="allow_trace",
                remedy="set allow_trace = true in the worker's [prefill] section",
            )
        check_token_ids(ids, self._engine.spec.vocab_size, "token_ids")
        if len(ids) > self._limit:
            raise InvalidRequest(
                f"{len(ids)} tokens are more than the {self._limit} that can be traced",
                reason="TRACE_TOO_LONG",
                field="token_ids",
                remedy="compare a shorter prompt",
            )
        if not 0 < count <= MAX_COLUMNS:
            raise InvalidRequest(
                f"{count} columns are not between 1 and {MAX_COLUMNS}",
                reason="INVALID_COLUMNS",
                field="columns",
                remedy=f"ask for 1 to {MAX_COLUMNS}",
            )


def _traced_step(engine: Engine, recording: Recording, chunk: Chunk, cancelled: Callable[[], bool]) -> StepOutput:
    """Runs in the engine's thread."""
    trace = StepTrace()
    output = engine.step(StepPlan((chunk,)), cancelled=cancelled, trace=trace)
    recording.add(trace, output)
    return output


def _finish(recording: Recording, ids: tuple[int, ...], output: StepOutput, count: int) -> TracedRun:
    """Runs in the engine's thread too: it reads the pages."""
    seen = recording.observed(recording.parts[OWNER], ids, len(ids), (output.logits[OWNER][-1],), count=count)
    rows = [_travelling(layer, name, found) for layer, each in enumerate(seen.layers) for name, found in each.items()]
    rows.append(_travelling(len(seen.layers), "logits", Rows.of(seen.logits[0][None])))
    broken = tuple((each.check, each.message) for each in recording.broken)
    return TracedRun(seen.positions, seen.cached, broken, tuple(rows))


def _travelling(layer: int, name: str, rows: Rows) -> TracedRows:
    data = rows.data.to(wide(rows.data.dtype) if rows.data.is_floating_point() else torch.float64).contiguous()
    return TracedRows(
        layer=layer,
        tensor=name,
        shape=rows.shape,
        columns=data.shape[1],
        dtype="float64" if data.dtype == torch.float64 else "fp32",
        norms=tuple(rows.norms.tolist()),
        data=data.numpy().astype(_LITTLE_ENDIAN[data.dtype], copy=False).tobytes(),
    )
