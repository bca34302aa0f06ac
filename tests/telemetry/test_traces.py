"""One request, one trace: what a collector gets of a router and its workers, each with an exporter of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import grpc
import httpx
import pytest

from pdserve.errors import ConfigError, Unavailable
from pdserve.request import SamplingParams
from pdserve.rpc.convert import sampling_to_proto
from pdserve.telemetry import traces as module
from pdserve.telemetry.context import TraceContext, parse
from pdserve.telemetry.settings import TelemetrySettings
from pdserve.telemetry.traces import Traces
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from router.tenants import Tenant
from tests.e2e.resuming import BUNDLE, lose, scene
from tests.e2e.stack import MODEL, Stack, pair, pause, stack, streaming
from tests.e2e.watched import WAIT_S, engine
from tests.telemetry.collector import Collector, Seen, collecting

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
KEY, PROMPT = "sk-acme-0123456789abcdef", "the*planted*prompt*of*acme"
GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0, ignore_eos=True)
Call = grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.GenerateEvent]
SERVER, CLIENT = 2, 3  # SpanKind in opentelemetry.proto


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        yield made


def exporting() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Otel")]


def check_within(spans: list[Seen]) -> None:
    """Each span lies within its parent, give or take what two readings of two clocks differ by."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert 0 < span.begun <= span.ended
        if parent := by_id.get(span.parent_id):
            assert span.begun >= parent.begun - 5e6, (span.name, parent.name)


async def test_one_trace_across_all_parts_below_the_callers_span(collector: Collector) -> None:
    async with stack(tenants=(Tenant.of("acme", KEY),)) as made:
        await made.add_prefill(engine(), bundle=BUNDLE)
        await made.add_decode(engine(), bundle=BUNDLE)
        headers = {"authorization": f"Bearer {KEY}", "traceparent": PARENT, "tracestate": "congo=t61, rojo=1"}
        headers |= {"x-request-id": "mine-1", "baggage": "planted=baggage"}
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "pdserve_record": True}
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}/v1", timeout=WAIT_S) as http:
            answer = await http.post("/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    request_id, record = answer.headers["x-request-id"], answer.json()["pdserve_record"]
    assert record["request_id"] == request_id and record["trace_id"] == TRACE

    spans = collector.spans
    assert {span.trace_id for span in spans} == {TRACE} and {span.state for span in spans} == {"congo=t61,rojo=1"}
    check_within(spans)
    request, attempt = collector.only(f"text_completion {MODEL}"), collector.only("attempt")
    prefill, transfer, receive = (collector.only(name) for name in ("prefill", "transfer", "receive"))
    decode = collector.only("decode")
    assert (request.parent_id, request.kind, request.part) == (SPAN, SERVER, "router")
    assert collector.below(request) == {"placement", "attempt"}
    assert (attempt.kind, collector.below(attempt)) == (CLIENT, {"prefill", "decode"})
    assert (prefill.part, collector.below(prefill)) == ("prefill", {"queue", "compute", "transfer"})
    assert (transfer.kind, collector.below(transfer)) == (CLIENT, {"receive"})
    assert (receive.part, receive.kind, collector.below(receive)) == ("decode", SERVER, {"verify"})
    assert (decode.part, decode.kind, collector.below(decode)) == ("decode", SERVER, {"first token", "stream"})
    assert {span.service for span in spans} == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}

    told = request.attributes
    assert told["gen_ai.operation.name"] == "text_completion" and told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] == len(PROMPT) and told["gen_ai.usage.output_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["pdserve.tenant"] == "acme"
    assert (told["pdserve.request_id"], told["pdserve.label"]) == (request_id, "mine-1")
    handoffs = {span.attributes["pdserve.handoff_id"] for span in (attempt, prefill, receive, decode)}
    assert len(handoffs) == 1
    assert transfer.attributes["pdserve.bytes"] == record["bytes_sent"]
    assert receive.attributes["pdserve.frames"] == record["frames_sent"] > 0
    assert attempt.attributes["pdserve.prefill_worker"] == "p0" and not any(span.failed for span in spans)
    for word in (PROMPT, KEY, "planted"):
        assert word not in str(spans)


async def test_a_request_that_moves_keeps_its_trace(collector: Collector) -> None:
    async with scene() as it, it.stopped(GREEDY, 3) as (task, worker, stopping):
        lose(worker)
        stopping.let_go()
        async with asyncio.timeout(WAIT_S):
            answer = await task
    assert answer.record is not None and answer.record.attempts == 2
    assert {span.trace_id for span in collector.spans} == {answer.record.trace_id}
    first, second = sorted(collector.named("attempt"), key=lambda span: span.begun)
    request = collector.only(f"text_completion {MODEL}")
    assert first.parent_id == second.parent_id == request.span_id and not request.failed
    assert (first.failed, first.attributes["error.type"]) == (True, "ENDED")
    assert first.attributes["pdserve.failed_worker"] == worker.worker_id and not second.failed
    assert second.attributes["pdserve.first_index"] == 3
    for attempt in (first, second):
        assert collector.below(attempt) == {"prefill", "decode"}
    (lost,) = [span for span in collector.named("decode") if span.failed]
    assert lost.parent_id == first.span_id and lost.attributes["error.type"] == "ENDED"
    assert len(collector.named("placement")) == len(collector.named("receive")) == 2


async def test_another_prefill_worker_is_another_attempt_of_the_same_decode_span(collector: Collector) -> None:
    first, second = engine(), engine()
    async with stack() as made:
        prefill = await made.add_prefill(first)
        await made.add_decode()
        with first.held():
            task = asyncio.create_task(made.ask((1, 2, 3, 4, 5), GREEDY))
            async with asyncio.timeout(WAIT_S):
                await first.inside.wait()
            await made.add_prefill(second)
            prefill.pipeline.end_all(Unavailable("ended by the test", reason="ENDED", field="here"))
        async with asyncio.timeout(WAIT_S):
            answer = await task
    assert answer.record is not None and answer.record.attempts == 2
    before, after = sorted(collector.named("attempt"), key=lambda span: span.begun)
    assert (before.failed, before.attributes["pdserve.error.field"], after.failed) == (True, "here", False)
    assert (collector.below(before), collector.below(after)) == ({"prefill", "decode"}, {"prefill"})
    broken, good = sorted(collector.named("prefill"), key=lambda span: span.begun)
    assert broken.failed and not good.failed
    assert {span.failed for span in collector.named("transfer")} == {True, False}
    assert not collector.only("decode").failed
    assert broken.attributes["pdserve.handoff_id"] == good.attributes["pdserve.handoff_id"]


async def test_a_prompt_computed_at_decode_and_a_client_that_leaves(collector: Collector) -> None:
    long = replace(GREEDY, max_tokens=100)
    async with pair(disaggregate="never") as made, streaming(made, (1, 2, 3, 4, 5), long):
        pass
    request, decode = collector.only(f"text_completion {MODEL}"), collector.only("decode")
    assert not request.failed and request.attributes["pdserve.outcome"] == "CANCELLED"
    assert not decode.failed and collector.below(decode) == {"queue", "compute", "stream"}
    assert collector.below(collector.only("attempt")) == {"decode"}
    assert collector.only("placement").attributes["pdserve.placement"] == "decode"


async def ask(made: Stack, *metadata: tuple[str, str], model: str = MODEL) -> Call:
    request = gateway_pb2.GenerateRequest(
        model=model,
        tokens=gateway_pb2.TokenPrompt(ids=(1, 2, 3)),
        sampling=sampling_to_proto(GREEDY),
        want_record=True,
    )
    stub = gateway_pb2_grpc.GatewayStub(made.channels.get(made.router.address))
    call: Call = stub.Generate(request, timeout=WAIT_S, metadata=metadata)
    return call


async def told_id(call: Call) -> str:
    (found,) = [value for key, value in await call.trailing_metadata() if key == "x-request-id"]
    return str(found)


async def test_a_malformed_traceparent_begins_a_trace_and_a_refused_request_has_one_too(collector: Collector) -> None:
    async with pair() as made:
        call = await ask(made, ("traceparent", PARENT + "-x"), ("tracestate", "a=1"), ("x-request-id", "no id of ours"))
        records = [event.record async for event in call if event.HasField("record")]
        assert records[0].request_id == await told_id(call)
        refused = await ask(made, ("traceparent", PARENT), model="another")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused.read()
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        refused_id = await told_id(refused)
    request, other = collector.only(f"text_completion {MODEL}"), collector.only("text_completion")
    assert request.trace_id == records[0].trace_id != TRACE
    assert not request.parent_id and not request.state and "pdserve.label" not in request.attributes
    assert (other.trace_id, other.parent_id, other.failed) == (TRACE, SPAN, True)
    assert other.attributes["pdserve.request_id"] == refused_id
    assert (other.attributes["error.type"], other.attributes["pdserve.error.field"]) == ("UNKNOWN_MODEL", "model")


async def test_off_nothing_runs_and_the_callers_trace_is_passed_on() -> None:
    async with pair() as made:
        call = await ask(made, ("traceparent", PARENT))
        records = [event.record async for event in call if event.HasField("record")]
        assert records[0].trace_id == TRACE
        assert not exporting() and not made.router.traces.on
        (host,) = made.hosts
        assert host.traces == [parse([PARENT], [])]


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    used = "import sys; from pdserve.telemetry.traces import OFF; OFF.open(); OFF.start('x', None).end()"
    found = f"{used}; print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))])"
    result = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("listens", [True, False])
async def test_a_dead_collector_costs_spans_and_nothing_else(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        if not listens:
            silent.close()
        async with pair() as made:
            assert made.router.traces.on and len(exporting()) == 3
            answer = await made.ask((1, 2, 3), GREEDY)
            assert len(answer.ids) == 6
        async with asyncio.timeout(WAIT_S):
            while exporting():
                await pause(0.01)


async def test_the_environments_variables_hold(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(**settings: float | str) -> Traces:
        made = Traces(TelemetrySettings(**settings), "router")  # type: ignore[arg-type]
        made.open()
        return made

    async def one(made: Traces, parent: TraceContext | None = None) -> TraceContext:
        span = made.start("x", parent)
        span.end()
        await made.close()
        assert span.context is not None
        return span.context

    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    assert (await one(opened())).sampled
    assert collector.only("x").service == "ours"
    collector.spans.clear()
    assert not (await one(opened(sample_ratio=0.0))).sampled
    assert (await one(opened(sample_ratio=0.0), parse([PARENT], []))).sampled  # its caller wants it
    assert len(collector.spans) == 1
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert not (await one(opened(), parse([PARENT], []))).sampled
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not opened().on
    assert not exporting()


def test_an_exporter_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError) as error:
        Traces(TelemetrySettings(otlp_endpoint="http://127.0.0.1:1"), "router").open()
    assert error.value.field == "telemetry.otlp_endpoint"
    assert error.value.remedy == "pip install opentelemetry-exporter-otlp-proto-grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    asked_by_the_environment = Traces(TelemetrySettings(), "router")
    asked_by_the_environment.open()
    assert not asked_by_the_environment.on and "nothing is traced" in caplog.text
    with pytest.raises(ConfigError) as error:
        TelemetrySettings(otlp_endpoint="collector:4317").check()
    assert error.value.field == "telemetry.otlp_endpoint"
