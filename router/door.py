"""What a request gets at its door, HTTP or gRPC: an id of ours, and the place in a trace that its caller names.

A caller's `x-request-id` is a label for logs and records, never an id of ours; one that is no short printable ASCII
counts as absent. Answers carry ours as `x-request-id`. Nothing else of a caller's headers reaches a worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pdserve.telemetry.context import (
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
    Scope,
    current,
    enter,
    is_request_id,
    parse,
)

PART = "router"


def new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def come_in(headers: Callable[[str], list[str]]) -> None:
    """Enters the scope of a new request. `headers`: all values of a header, or of a key of metadata."""
    labels = [text for text in headers(REQUEST_ID) if is_request_id(text)]
    enter(
        Scope(
            part=PART,
            request_id=new_id(),
            label=labels[0] if len(labels) == 1 else "",
            trace=parse(headers(TRACEPARENT), headers(TRACESTATE)),
        )
    )


def answer_headers() -> dict[str, str]:
    """Headers, or trailing metadata, of the answer."""
    scope = current()
    return {REQUEST_ID: scope.request_id} if scope.request_id else {}
