"""The spans of one prompt at its prefill worker.

prefill              received .. answered; below the router's attempt
  queue              received .. it leaves the queue
  compute            first chunk started .. logits ready
  transfer           push opened .. acknowledged; the parent of what the decode worker does with it
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cache_transfer.sender import SendReport
from pdserve.errors import PdserveError
from pdserve.telemetry.context import current, enter
from pdserve.telemetry.traces import CLIENT, SERVER, Attributes, Span, Traces
from prefill_worker.admission import PrefillRequest

if TYPE_CHECKING:
    from prefill_worker.handoff import Job


class PromptTrace:
    """Mutable. Made in the call that brings the prompt; `scope` is for lines and tasks that are not the call's own."""

    def __init__(self, traces: Traces, request: PrefillRequest, received: float) -> None:
        self._traces = traces
        told: Attributes = {
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": len(request.ids),
            "pdserve.request_id": request.request_id,
            "pdserve.tenant": request.tenant,
            "pdserve.handoff_id": request.ticket.handoff_id.hex(),
            "pdserve.attempt": request.ticket.attempt,
        }
        self._root = traces.start("prefill", current().trace, told, kind=SERVER, at=received)
        self._transfer = Span(None)
        self.scope = replace(
            current(),
            handoff_id=request.ticket.handoff_id.hex(),
            attempt=request.ticket.attempt,
            trace=self._root.context,
        )

    def push(self, admitted: float) -> None:
        """The running task opens the push."""
        self._transfer = self._traces.start("transfer", self._root.context, kind=CLIENT, at=admitted)
        enter(replace(self.scope, trace=self._transfer.context))

    def end(self, job: Job, error: PdserveError | None, report: SendReport | None) -> None:
        if not self._traces.on:
            return
        now, below = time.monotonic(), self._root.context
        waited = None if job.admitted else error
        self._traces.record("queue", below, job.received, job.admitted or now, error=waited)
        computed = {"pdserve.computed_tokens": job.prompt.done - job.prompt.cached, "pdserve.steps": job.prompt.chunks}
        failed = None if job.computed else error
        self._traces.record("compute", below, job.computing, job.computed or now, computed, error=failed)
        if report is not None:
            self._transfer.set(
                {
                    "pdserve.bytes": report.payload_bytes + job.logits_bytes,
                    "pdserve.frames": report.frames,
                    "pdserve.sent_tokens": report.sent_tokens,
                    "pdserve.grant_ms": 1000 * (report.granted_at - job.admitted),
                }
            )
        self._root.set({"gen_ai.usage.cache_read.input_tokens": job.prompt.cached, "pdserve.outcome": job.prompt.state})
        for span, at in ((self._transfer, report.ack_at if report else now), (self._root, now)):
            if error is not None:
                span.fail(error.reason, error)
            span.end(at)
