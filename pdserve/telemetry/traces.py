"""Spans of one part of a deployment, sent to a collector by OpenTelemetry's own SDK and exporter.

Off unless an endpoint is configured: then nothing of OpenTelemetry is imported, no thread runs, and a span only hands
on the context that it was given. Where a time was measured anyway a span is made of it afterwards, so nothing is done
for a token. Spans hold ids, counts, times and error codes; never text, tokens or keys.

A collector that is slow or away costs spans and nothing else: they wait in a bounded queue that a thread empties.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError
from pdserve.telemetry.context import TraceContext
from pdserve.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, Tracer

log = logging.getLogger(__name__)

INTERNAL, SERVER, CLIENT = "INTERNAL", "SERVER", "CLIENT"

FLUSH_S = 2.0  # for the last spans to reach the collector when a part stops
GIVE_UP_S = 1.0  # for the exporter to let go of a collector that does not answer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FINISHES = ("stop", "length")

Attribute = str | int | float | bool | tuple[str, ...] | None
Attributes = Mapping[str, Attribute]


class Span:
    """A span that is open. `context` is what its children are told; may be None where nothing is traced."""

    def __init__(self, context: TraceContext | None, real: Any = None) -> None:
        self.context = context
        self._real = real

    def set(self, attributes: Attributes) -> None:
        """None and empty text are left out."""
        if self._real is not None:
            self._real.set_attributes(_told(attributes))

    def fail(self, reason: str, error: PdserveError | None = None) -> None:
        """Marks it as failed with an error's code and field; its text may quote what a caller sent."""
        if self._real is not None:
            from opentelemetry.trace import Status, StatusCode

            field = error.field if error is not None else ""
            self._real.set_attributes(_told({"error.type": reason, "pdserve.error.field": field}))
            self._real.set_status(Status(StatusCode.ERROR, reason))

    def end(self, at: float = 0.0) -> None:
        """`at`: monotonic seconds; 0: now."""
        if self._real is not None:
            self._real.end(_wall_ns(at))


class Traces:
    """open() -> spans -> close(). Without `open` every span is a mere context."""

    def __init__(self, settings: TelemetrySettings, part: str, instance: str = "") -> None:
        """`instance`: the worker's id."""
        self._settings = settings
        self._part = part
        self._instance = instance
        self._tracer: Tracer | None = None
        self._provider: TracerProvider | None = None
        self._exporter: SpanExporter | None = None

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def open(self) -> None:
        """Begins to export, where an endpoint is configured. Raises ConfigError for one that is in the configuration
        and cannot be used; what the environment alone asks for is logged instead, since it may be meant for others.
        """
        if self.on or not _wanted(self._settings):
            return
        try:
            self._open()
        except ImportError:
            self._refuse("the exporter is not installed", "pip install opentelemetry-exporter-otlp-proto-grpc")
        except Exception as error:  # noqa: BLE001  # a variable of the SDK that it cannot read, or a certificate
            self._refuse(f"the exporter cannot be made: {error}", "correct the OTEL_ variables, or unset them")

    async def close(self) -> None:
        """Sends what is left, within FLUSH_S + GIVE_UP_S. Idempotent."""
        provider, exporter = self._provider, self._exporter
        self._tracer = self._provider = self._exporter = None
        if provider is None or exporter is None:
            return
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            provider.shutdown()
            loop.call_soon_threadsafe(over.set)

        # A thread of its own: one of the loop's pool would be waited for at the end of the process.
        threading.Thread(target=shut_down, name="traces-close", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_S):
                await over.wait()
        except TimeoutError:
            log.warning("the collector does not take the last spans, they are lost")
            exporter.shutdown()  # breaks off the call that its thread is in
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await over.wait()
            except TimeoutError:
                log.warning("the exporter's thread is abandoned")

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        *,
        kind: str = INTERNAL,
        at: float = 0.0,
    ) -> Span:
        """A span below `parent`, the first of a trace if that is None. `at`: monotonic seconds; 0: now."""
        if self._tracer is None:
            return Span(parent)
        from opentelemetry.trace import SpanKind

        real = self._tracer.start_span(
            name, _below(parent), SpanKind[kind], _told(attributes or {}), start_time=_wall_ns(at)
        )
        return Span(_context_of(real.get_span_context()), real)

    def record(
        self,
        name: str,
        parent: TraceContext | None,
        begun: float,
        ended: float,
        attributes: Attributes | None = None,
        *,
        kind: str = INTERNAL,
        error: PdserveError | None = None,
    ) -> None:
        """A span that is over. Times in monotonic seconds; none where one of them has not come (0)."""
        if self._tracer is None or not begun or not ended:
            return
        span = self.start(name, parent, attributes, kind=kind, at=begun)
        if error is not None:
            span.fail(error.reason, error)
        span.end(ended)

    def _open(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "grpc")
        if protocol != "grpc" and not self._settings.otlp_endpoint:
            raise ValueError(f"{protocol} is not spoken, only grpc")
        ratio = self._settings.sample_ratio
        exporter = OTLPSpanExporter(endpoint=self._settings.otlp_endpoint or None)
        provider = TracerProvider(
            sampler=None if ratio == 1 else ParentBasedTraceIdRatio(ratio),
            resource=Resource.create(self._resource()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider, self._exporter = provider, exporter
        self._tracer = provider.get_tracer("pdserve", __version__)

    def _resource(self) -> dict[str, str]:
        known = {"service.version": __version__, "pdserve.part": self._part}
        if self._instance:
            known["service.instance.id"] = self._instance
        named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not os.environ.get("OTEL_SERVICE_NAME") and not named:
            known["service.name"] = f"pdserve-{self._part}"
        return known

    def _refuse(self, problem: str, remedy: str) -> None:
        if self._settings.otlp_endpoint:
            raise ConfigError(problem, reason="NO_EXPORTER", field="telemetry.otlp_endpoint", remedy=remedy)
        log.warning("nothing is traced: %s (%s)", problem, remedy)


OFF = Traces(TelemetrySettings(), "")


def is_failure(outcome: str) -> bool:
    """Whether a request's outcome is neither an end of its text nor its client's wish."""
    return outcome not in (*_FINISHES, "CANCELLED")


def _wanted(settings: TelemetrySettings) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("otlp", ""):
        return False
    return bool(settings.otlp_endpoint or any(os.environ.get(name) for name in _ENDPOINTS))


def _wall_ns(at: float) -> int:
    """Of a monotonic time that is not long ago."""
    now = time.time_ns()
    return now if not at else now - round(1e9 * (time.monotonic() - at))


def _told(attributes: Attributes) -> dict[str, str | int | float | bool | tuple[str, ...]]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _below(parent: TraceContext | None) -> Context:
    """OpenTelemetry's own form of a parent."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if parent is None:
        return Context()
    flags = TraceFlags(parent.sampled | parent.random << 1)
    state = TraceState.from_header([parent.state]) if parent.state else None
    context = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(context), Context())


def _context_of(context: SpanContext) -> TraceContext:
    flags = int(context.trace_flags)
    return TraceContext(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        bool(flags & 1),
        bool(flags & 2),
        context.trace_state.to_header(),
    )
