"""A collector as OpenTelemetry defines it: a gRPC server of its TraceService that keeps the spans it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Seen:
    """One span as it arrived."""

    part: str
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begun: int  # nanoseconds since 1970
    ended: int
    state: str  # trace state
    failed: bool
    attributes: dict[str, Any]


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.url = ""

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            told = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, told["pdserve.part"], told["service.name"]) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> Seen:
        (span,) = self.named(name)
        return span

    def below(self, span: Seen) -> set[str]:
        """Names of its children."""
        return {each.name for each in self.spans if each.parent_id == span.span_id}


@contextmanager
def collecting() -> Iterator[Collector]:
    with ThreadPoolExecutor(2) as threads:
        server, made = grpc.server(threads), Collector()
        add: Any = pb_grpc.add_TraceServiceServicer_to_server
        add(made, server)
        made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield made
        finally:
            server.stop(None).wait()


def _seen(span: trace_pb2.Span, part: str, service: str) -> Seen:
    return Seen(
        part,
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.trace_state,
        span.status.code == ERROR,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
