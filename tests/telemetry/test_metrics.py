"""Metrics of a really running system: the numbers are right, the page is as documented, and not for everybody."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
import pytest_asyncio
import uvloop

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.errors import Cancelled, ConfigError, InvalidRequest, Unavailable
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.tls import CLIENT, WORKER, http_context
from pdserve.telemetry import exporter
from pdserve.telemetry.counting import MAX_SERIES, OTHER, Counts, Histogram, Histograms, Refusals
from pdserve.telemetry.exporter import MAX_CONNECTIONS, MAX_HEADER_BYTES, MetricsListener, MetricsPage
from pdserve.telemetry.metrics import PREFIX, Families
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.e2e.stack import stack
from tests.e2e.watched import engine
from tests.rpc.certificates import make_certificates, rpc_of
from tests.telemetry.scraped import KEYS, OPENMETRICS, PROMPT, Observed, get, observed, traffic
from tests.telemetry.scraped import Families as Scraped

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
PARTS = {"all": {"router", "prefill", "decode"}, "workers": {"prefill", "decode"}}
OUTPUTS, TOKENS = 6, 12  # what `traffic` brings back


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(folder: Path) -> AsyncIterator[Observed]:
    async with observed(folder) as it:
        await traffic(it.made, folder)
        yield it


def total(pages: Scraped | Iterable[Scraped], name: str, /, **labels: str) -> float:
    """Over all samples of that name with these labels."""
    several = [pages] if isinstance(pages, dict) else list(pages)
    samples = [sample for page in several for family in page.values() for sample in family.samples]
    wanted = {("part" if key == "of" else key): value for key, value in labels.items()}
    return sum(s.value for s in samples if s.name == PREFIX + name and wanted.items() <= s.labels.items())


async def test_the_router_has_counted_what_came_and_what_it_said(busy: Observed) -> None:
    page = await busy.router()
    assert total(page, "requests_total", model="tiny", outcome="length") == total(page, "requests_total") == 5
    assert total(page, "generation_tokens_total", model="tiny") == OUTPUTS * TOKENS
    assert total(page, "prompt_tokens_total", model="tiny") == 5 * len(PROMPT)
    assert total(page, "time_to_first_token_seconds_count") == total(page, "e2e_request_latency_seconds_count") == 5
    assert 0 < total(page, "inter_token_latency_seconds_count") <= OUTPUTS * (TOKENS - 1)
    assert total(page, "time_to_first_token_seconds_sum") < total(page, "e2e_request_latency_seconds_sum")
    assert total(page, "tenant_requests_total", tenant="zeta") == 1
    assert total(page, "tenant_tokens_total", tenant="zeta", kind="generation") == TOKENS
    assert total(page, "tenant_tokens_total", tenant="acme", kind="prompt") == 4 * len(PROMPT)
    assert total(page, "quota_refusals_total", tenant="zeta", reason="TENANT_REQUESTS") == 1
    refusals = {"TENANT_REQUESTS": "requests_per_minute", "INVALID_API_KEY": "", "TOKEN_OUT_OF_RANGE": ""}
    for reason, field in refusals.items():
        assert total(page, "refusals_total", reason=reason, field=field) == 1, reason
    assert total(page, "refusals_total") == len(refusals)
    assert total(page, "resumes_total") == 1
    assert total(page, "attempt_failures_total", pool="decode") == total(page, "attempt_failures_total") == 1
    assert total(page, "placements_total", where="prefill") == 6
    assert total(page, "workers", pool="decode", state="ready") == 2 and total(page, "workers") == 3
    assert total(page, "model_ready", model="tiny") == total(page, "registry_up") == 1


async def test_both_sides_of_the_handoffs_count_the_same(busy: Observed) -> None:
    pages = await busy.workers()
    prefill, decodes = pages.pop("p0"), list(pages.values())
    for name in ("transfers_total", "transfer_bytes_total", "transfer_seconds_count"):
        labels = {"outcome": "ok"} if name == "transfers_total" else {}
        assert total(prefill, name, **labels) == total(decodes, name, **labels) > 0
    sent = len(PROMPT) * 5 + 3 + len(PROMPT)  # the answer that moved brought three tokens of output along
    assert total(prefill, "prefix_cache_queries_total") in range(sent, sent + TOKENS)
    found = total(prefill, "prefix_cache_hits_total")
    assert total(prefill, "prefill_tokens_total") == total(prefill, "prefix_cache_queries_total") - found and found > 0
    assert total(decodes, "decode_tokens_total") >= OUTPUTS * TOKENS
    assert total(decodes, "forks_total") == 2
    assert total(prefill, "worker_requests_total", outcome="released") == 6
    assert total(decodes, "worker_requests_total", outcome="done") == 5
    assert total(decodes, "worker_requests_total", outcome="failed") == 1
    for page in (prefill, *decodes):
        assert total(page, "kv_cache_pages", state="held") == total(page, "requests_running") == 0
        pages_of_pool = total(page, "kv_cache_pages")
        assert pages_of_pool == 128 and total(page, "worker_state", state="ready") == 1
        assert total(page, "engine_steps_total") >= total(page, "engine_step_seconds_count") > 0


async def test_what_is_exported_is_what_is_documented(busy: Observed) -> None:
    """Name, type, labels and part of every metric, in both directions."""
    documented = table()
    exported: dict[str, tuple[str, set[str], set[str]]] = {}
    for page in await busy.everything():
        for family in page.values():
            if not family.name.startswith(PREFIX):
                assert family.name.startswith("process_"), family.name
                continue
            name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
            assert family.documentation
            known = exported.setdefault(name, (family.type, set(), set()))
            for sample in family.samples:
                known[1].update(sample.labels.keys() - {"part", "le"})
                known[2].add(sample.labels["part"])
    assert exported.keys() == documented.keys()
    for name, (kind, labels, parts) in exported.items():
        assert (kind, labels) == documented[name][:2], name
        assert parts <= documented[name][2], name
        assert parts == documented[name][2] or name == "refusals_total", name  # no worker refused anything


def table() -> dict[str, tuple[str, set[str], set[str]]]:
    """docs/observability.md: type, labels and parts of each metric."""
    section = DOCS.read_text().partition("### All metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\| (\w+) \| .+ \|$", section, re.MULTILINE)
    assert len(rows) == len({row[0] for row in rows}) > 40
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), PARTS.get(part, {part})) for name, kind, labels, part in rows
    }


async def test_openmetrics_tells_the_same(busy: Observed) -> None:
    plain, new = await busy.router(), await busy.router(OPENMETRICS)
    names = {family.name.removesuffix("_total") for family in plain.values()}
    assert names == {family.name for family in new.values()}
    for name in ("requests_total", "refusals_total", "time_to_first_token_seconds_count"):
        assert total(plain, name) == total(new, name) > 0


async def test_pages_are_for_operators_and_tell_no_secret(busy: Observed, folder: Path) -> None:
    """Of the router by key, of the workers by certificate; both before anything is read."""
    for path in ("/metrics", "/metrics/targets"):
        for key, status in ((KEYS["zeta"], 403), ("sk-nobody-0123456789abcdef", 401), ("", 401)):
            headers = {"authorization": f"Bearer {key}" if key else ""}
            assert (await busy.get(path, headers=headers)).status_code == status
    address = busy.made.prefills[0].record().metrics
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    async with httpx.AsyncClient(verify=trusting) as nobody:
        with pytest.raises(httpx.HTTPError):
            await get(nobody, f"{address}/metrics", WORKER)
    trusting.load_cert_chain(folder / CLIENT / "tls.crt", folder / CLIENT / "tls.key")
    async with httpx.AsyncClient(verify=trusting) as somebody:
        assert (await get(somebody, f"{address}/metrics", WORKER)).status_code == 403
    text = (await busy.get("/metrics")).text + (await busy.get("/metrics", WORKER, address)).text
    assert not any(secret in text for secret in KEYS.values())


async def test_an_open_page_needs_no_key_and_a_worker_may_have_none(folder: Path) -> None:
    async with stack(metrics_open=True, tenants=()) as made, httpx.AsyncClient() as http:
        worker = await made.add_decode(metrics_port=-1)
        assert worker.record().metrics == ""
        base = f"http://{made.router.http_address}"
        assert (await http.get(f"{base}/metrics")).status_code == 200
        assert (await http.get(f"{base}/metrics/targets")).json() == []


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
async def test_a_page_beyond_this_machine_needs_leave(kind: Any) -> None:
    settings = PrefillSettings if kind is PrefillWorker else DecodeSettings
    with pytest.raises(ConfigError) as caught:
        await kind(engine(), None, settings(metrics_host="0.0.0.0")).start()
    assert caught.value.reason == "PLAINTEXT_REFUSED"
    everywhere = kind(engine(), None, settings(metrics_host="0.0.0.0", rpc=RpcSettings(allow_plaintext=True)))
    await everywhere.start()
    assert everywhere.record().metrics.startswith("127.0.0.1:")  # where others reach the worker
    await everywhere.stop()
    with pytest.raises(ConfigError) as caught:
        settings(metrics_port=-2).check()
    assert caught.value.field.endswith(".metrics_port")


async def test_a_histogram_is_what_prometheus_makes_of_the_same_numbers() -> None:
    bounds = (0.1, 0.25, 1.0, 5.0)
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("pdserve_x_seconds", "t", ["part"], registry=registry, buckets=bounds)
    ours = Histogram(bounds)
    for value in (0.0, 0.1, 0.100001, 0.25, 0.9, 5.0, 5.1, 1e9):
        theirs.labels("router").observe(value)
        ours.observe(value)
    theirs.labels("router").observe(0.3)
    theirs.labels("router").observe(0.3)
    ours.observe(0.3, 2)
    (expected,) = registry.collect()
    samples = {(s.name, s.labels.get("le")): s.value for s in expected.samples if not s.name.endswith("_created")}
    made = Families("router").histogram("x_seconds", "t", ours)
    assert {(s.name, s.labels.get("le")): s.value for s in made.samples} == pytest.approx(samples)


async def test_labels_that_peers_choose_are_bounded() -> None:
    counts, histograms = Counts("reason"), Histograms((1.0,), "model")
    for number in range(3 * MAX_SERIES):
        counts.add(f"REASON_{number}")
        histograms.of(f"model-{number}").observe(0.5)
    assert len(counts.values) == len(histograms.values) == MAX_SERIES + 1
    assert counts.values[OTHER,] == sum(histograms.values[OTHER,].counts) == 2 * MAX_SERIES
    assert sum(counts.values.values()) == 3 * MAX_SERIES


async def test_a_callers_words_are_no_label() -> None:
    refusals = Refusals()
    refusals.count(InvalidRequest("there is no such option", field="my secret", reason="UNKNOWN_FIELD"))
    refusals.count(Unavailable("no worker", field="model", reason="NO_WORKER"))
    assert refusals.values == {("UNKNOWN_FIELD", ""): 1, ("NO_WORKER", "model"): 1}
    with pytest.raises(Cancelled), refusals.counting():
        raise Cancelled("the client has gone")
    assert len(refusals.values) == 2


async def test_the_listener_answers_one_question_and_lets_nobody_stay() -> None:
    listener = MetricsListener(MetricsPage(prometheus_client.CollectorRegistry()), "127.0.0.1", 0)
    port = await listener.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert "process_open_fds" in (await http.get("/metrics?x=1")).text
            assert [(await http.request(how, "/metrics")).status_code for how in ("HEAD", "POST")] == [200, 405]
            assert (await http.get("/")).status_code == 404
        for garbage in (b"\x16\x03\x01 hello\r\n\r\n", b"GET /metrics HTTP/1.1\r\nx: " + b"y" * MAX_HEADER_BYTES):
            assert (await said(port, garbage)).startswith(b"HTTP/1.1 400 ")
        waiting = [await opened(port) for _ in range(MAX_CONNECTIONS)]
        assert await said(port, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n") == b""  # one too many
        for _, writer in waiting:
            writer.close()
    finally:
        await listener.stop()


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=\xff", "a; version=1; escaping=x", ",;=" * 999]
)
async def test_an_accept_header_that_means_nothing_gets_the_plain_format(accept: str) -> None:
    body, content_type = MetricsPage(prometheus_client.CollectorRegistry()).render(accept)
    assert b"process_open_fds" in body and content_type.startswith("text/plain")


async def test_who_says_nothing_where_tls_is_spoken_is_not_waited_for_longer_than_anybody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "EXCHANGE_S", 0.1)
    tls = http_context(rpc_of(folder, WORKER).tls, client_certificates=True)
    listener = MetricsListener(MetricsPage(prometheus_client.CollectorRegistry()), "127.0.0.1", 0, tls)
    port = await listener.start()
    try:
        async with asyncio.timeout(5):
            assert await said(port, b"") == b""
    finally:
        await listener.stop()


async def test_the_listener_works_on_the_event_loop_of_ray_serve() -> None:
    async def ask() -> str:
        listener = MetricsListener(MetricsPage(prometheus_client.CollectorRegistry()), "127.0.0.1", 0)
        port = await listener.start()
        try:
            async with httpx.AsyncClient() as http:
                return (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        finally:
            await listener.stop()

    def on_its_own_loop() -> str:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(ask())

    assert "process_open_fds" in await asyncio.to_thread(on_its_own_loop)


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def said(port: int, request: bytes) -> bytes:
    """All that comes back."""
    reader, writer = await opened(port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
