"""What one request leaves in the logs of all parts: lines that name it, its record, and none of its secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.client import AsyncClient
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.request import SamplingParams
from pdserve.telemetry.logs import configure
from pdserve.telemetry.settings import TelemetrySettings
from router.tenants import Tenant
from tests.e2e.processes import Process, until
from tests.e2e.resuming import BUNDLE
from tests.e2e.stack import MODEL, stack
from tests.e2e.watched import WAIT_S, engine
from tests.engine.tiny import tiny_model
from tests.telemetry.collector import collecting

KEY, WRONG_KEY = "sk-acme-0123456789abcdef", "sk-nobody-0123456789abcdef"
SECRET = "the*planted*prompt*of*acme"
IDS = (61, 7, 62, 8, 63, 9, 64, 10)
GREEDY = SamplingParams(temperature=0, max_tokens=4, seed=0, ignore_eos=True)
OF_CLIENTS = ("httpx", "httpcore")  # what the test itself asks with

CONFIG = f"""
[model]
path = "{{model}}"
name = "tiny"

[engine]
pages = 64
page_size = 4

[telemetry]
log_format = "json"
log_level = "debug"

[router]
port = 0
http_port = 0
tenants = [{{{{ name = "acme", keys = ["{KEY}"] }}}}]
"""


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = before
    root.setLevel(level)


async def test_prompts_and_keys_are_in_no_line_whatever_happens(logged: Callable[[], str]) -> None:
    configure(TelemetrySettings(log_format="json", log_level="debug"), "router")
    async with stack(tenants=(Tenant.of("acme", KEY),)) as made:
        await made.add_prefill(engine(), bundle=BUNDLE)
        await made.add_decode(engine(), bundle=BUNDLE)
        url = f"http://{made.router.http_address}/v1"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, headers={"authorization": f"Bearer {KEY}"}) as http:
            bodies: list[dict[str, object] | str] = [
                {"model": MODEL, "prompt": SECRET, "max_tokens": 4},
                {"model": MODEL, "prompt": SECRET, "max_tokens": 4, "stream": True, "logprobs": 1},
                {"model": MODEL, "prompt": SECRET, "max_tokens": 10**6},
                {"model": MODEL, "prompt": SECRET * 100},
                {"model": MODEL, "prompt": {"text": SECRET}},
                {"model": MODEL, "prompt": SECRET, "temperature": SECRET},
                {"model": MODEL, "prompt": SECRET, "stop": [SECRET], "max_tokens": 4},
                {"model": MODEL, "prompt": SECRET, "response_format": {"type": "regex", "regex": "(" + SECRET}},
                {"model": MODEL, "prompt": f"{SECRET}\ud800"},
                '{"prompt": "' + SECRET,
            ]
            statuses = []
            for body in bodies:
                content = body if isinstance(body, str) else json.dumps(body)
                statuses.append((await http.post("/completions", content=content)).status_code)
            refused = await http.get("/models", headers={"authorization": f"Bearer {WRONG_KEY}"})
        prefill = made.prefills[0]
        prefill.pipeline.end_all(prefill._not_serving())
    assert statuses[:2] == [200, 200] and {400} <= set(statuses) <= {200, 400} and refused.status_code == 401
    own = [str(line) for line in objects(logged()) if not line["logger"].startswith(OF_CLIENTS)]
    assert len(own) > 20
    for word in (SECRET, SECRET[4:20], KEY, WRONG_KEY, json.dumps(BUNDLE_IDS)[1:-1]):
        found = [line for line in own if word in line]
        assert not found, (word, [line[max(0, line.index(word) - 300) :][:400] for line in found])


BUNDLE_IDS = [byte - 0x21 for byte in SECRET.encode()]


async def test_every_process_names_the_request_in_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, config = tmp_path / "tiny.pdmodel", tmp_path / "pdserve.toml"
    save_spec_checkpoint(checkpoint, tiny_model().spec, tiny_model().tensors)
    config.write_text(CONFIG.format(model=checkpoint))
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        started = [Process("router", ["--config", str(config)], tmp_path / "router.log")]
        try:
            started[0].start()
            address = started[0].read_ready().split()[3]
            for role, name in (("prefill_worker", "p0"), ("decode_worker", "d0")):
                arguments = ["--config", str(config), "--worker-id", name, "--registry", f"grpc://{address}"]
                started.append(Process(role, arguments, tmp_path / f"{name}.log"))
                started[-1].start()
            for process in started[1:]:
                process.read_ready()
            async with AsyncClient(address, api_key=KEY) as client:
                await until(client, lambda status: len([w for w in status.workers if w.state == "ready"]) == 2)
                answer = await client.complete(token_ids=IDS, sampling=GREEDY, want_record=True, timeout_s=WAIT_S)
            for process in reversed(started):
                process.send(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait) == 0, process.log.read_text()
        finally:
            for process in started:
                process.kill()
    assert answer.record is not None
    logs = {name: objects((tmp_path / f"{name}.log").read_text()) for name in ("router", "p0", "d0")}
    of_request = {
        name: [line for line in lines if line.get("request_id") == answer.record.request_id]
        for name, lines in logs.items()
    }
    assert all(of_request.values()), logs
    named = {(line["part"], line.get("worker")) for lines in of_request.values() for line in lines}
    assert named == {("router", None), ("prefill", "p0"), ("decode", "d0")}
    (record,) = [line["record"] for line in of_request["router"] if line["message"] == "request"]
    assert record["trace_id"] == answer.record.trace_id and record["attempts"] == 1
    every = [line for lines in of_request.values() for line in lines]
    assert {line["trace_id"] for line in every if "trace_id" in line} == {answer.record.trace_id}
    released = [line for line in of_request["p0"] if "released" in line["message"]]
    assert released[0]["worker"] == "p0" and released[0]["attempt"] == 1 and len(released[0]["handoff_id"]) == 32
    assert {span.trace_id for span in collector.spans} == {answer.record.trace_id}
    assert {span.part for span in collector.spans} == {"router", "prefill", "decode"}
    whole = "".join((tmp_path / f"{name}.log").read_text() for name in logs)
    assert KEY not in whole and "61, 7, 62" not in whole and whole.count("\n") > 10
