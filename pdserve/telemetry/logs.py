"""What log lines look like, in every process of a deployment.

    text   2026-11-30 12:00:00,123 WARNING prefill_worker.pipeline: message [request_id=req-... attempt=1]
    json   {"time": "2026-11-30T12:00:00.123456Z", "level": "warning", "logger": ..., "message": ..., "request_id": ...}

Ids come from the scope of the running task (context.py). A record is one line whatever its values hold: control
characters are written as escapes; only a traceback goes on, in text, and each line of it is indented.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from pdserve.errors import InvalidRequest, PdserveError
from pdserve.telemetry.context import Scope, current
from pdserve.telemetry.settings import JSON, TelemetrySettings

_FIELDS = ("request_id", "handoff_id", "attempt", "trace_id")
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class Told:
    """A value of a message that is an object: JSON text in text lines, and a field of its own in JSON lines."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.value = value

    def __str__(self) -> str:
        return json.dumps(self.value)


def quoteless(error: PdserveError) -> str:
    """An error's text for logs and records. That of a wrong request may quote it, so only its field is told."""
    return f"in {error.field or 'the request'}" if isinstance(error, InvalidRequest) else str(error)


def about(scope: Scope) -> dict[str, Any]:
    """`extra` of a line on another request than that of the running task."""
    return {"scope": scope}


def configure(
    settings: TelemetrySettings,
    part: str,
    worker: str = "",
    *,
    level: str = "",
    style: str = "",
    stream: TextIO | None = None,
) -> None:
    """Sets up this process's root logger, in place of what was set up here before.

    Args:
        part: router, prefill or decode; with `worker` named in JSON lines that belong to no request.
        level, style: win over the settings, where given.
        stream: where lines go; None: standard error.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, (TextLines, JsonLines))]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    json_lines = (style or settings.log_format) == JSON
    handler.setFormatter(JsonLines(part, worker) if json_lines else TextLines())
    root.addHandler(handler)
    root.setLevel((level or settings.log_level).upper())


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's text of the traceback
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _ids(_scope_of(record)).items())
        return _escaped(super().formatMessage(record)) + (f" [{_escaped(ids)}]" if ids else "")

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


class JsonLines(logging.Formatter):
    def __init__(self, part: str, worker: str) -> None:
        super().__init__()
        self._part = part
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        scope = _scope_of(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        match record.args:
            case (Told() as told,):
                line |= {"message": str(record.msg).removesuffix(" %s"), "record": told.value}
            case _:
                line["message"] = record.getMessage()
        named = {"part": scope.part or self._part, "worker": scope.worker or self._worker}
        line |= {name: value for name, value in named.items() if value} | _ids(scope)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _scope_of(record: logging.LogRecord) -> Scope:
    scope = getattr(record, "scope", None)
    return scope if isinstance(scope, Scope) else current()


def _ids(scope: Scope) -> dict[str, Any]:
    trace_id = scope.trace.trace_id if scope.trace is not None else ""
    values = (scope.request_id, scope.handoff_id, scope.attempt, trace_id)
    return {name: value for name, value in zip(_FIELDS, values, strict=True) if value}


def _indented(text: str) -> str:
    return "\n".join(f"    {_escaped(line)}" for line in text.splitlines())


def _escaped(text: str) -> str:
    return text if text.isprintable() else text.translate(_ESCAPES)
