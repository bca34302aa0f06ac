"""What is kept of a request that no worker was asked for, because the gate or a check refused it: one log line, one
span.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from pdserve.errors import PdserveError, shown
from pdserve.telemetry.context import current
from pdserve.telemetry.logs import Told, quoteless
from pdserve.telemetry.traces import SERVER, Traces
from router.request import Ask
from router.tracing import operation

log = logging.getLogger("router.record")  # the same as of requests that were taken

_MAX_DIFFERENCES = 32
_MAX_TEXT = 1000  # characters


def log_refused(ask: Ask, error: PdserveError) -> None:
    text = quoteless(error)[:_MAX_TEXT]
    told = {"label": ask.label, "model": shown(ask.model), "outcome": error.reason, "error": text}
    rejected = [asdict(difference) for difference in error.differences[:_MAX_DIFFERENCES]]
    log.info("request %s", Told(told | {"rejected": rejected}))


def trace_refused(traces: Traces, ask: Ask, tenant: str, received: float, error: PdserveError) -> None:
    """`received`: monotonic seconds."""
    scope, name = current(), operation(ask)
    told = {"gen_ai.operation.name": name, "pdserve.request_id": scope.request_id, "pdserve.tenant": tenant}
    span = traces.start(name, scope.trace, told, kind=SERVER, at=received)
    span.fail(error.reason, error)
    span.end()
