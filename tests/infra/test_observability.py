"""Dashboard, alerts and scrape jobs name what a really running system exports, and what the other files have."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import yaml

from pdserve.config import load_config
from router.metrics import TARGETS
from tests.infra import promql, schemas
from tests.infra.manifests import INFRA, ROOT, _output
from tests.rpc.certificates import make_certificates
from tests.telemetry.scraped import KNOWN_TO_PROMETHEUS, observed, traffic

pytestmark = pytest.mark.asyncio(loop_scope="module")

Exported = dict[str, dict[str, set[str]]]

HERE = INFRA / "observability"
UNITS = {"none", "s", "bytes", "Bps", "reqps", "ops", "percentunit"}  # Grafana's names of them
SEVERITIES = {"info", "warning", "critical"}
OF_PROMETHEUS: Exported = {"up": {}}  # exported by Prometheus itself, of each target
JOBS = {"pdserve-router", "pdserve-workers"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exported(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Exported]:
    """Every sample's name, its labels and their values."""
    folder = make_certificates(tmp_path_factory.mktemp("certificates"))
    found: Exported = {}
    async with observed(folder) as it:
        await traffic(it.made, folder)
        for page in await it.everything():
            for sample in (sample for family in page.values() for sample in family.samples):
                labels = found.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)
        yield found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads((HERE / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str, list[str]]]:
    """Where it stands, the query, and the labels that its legend or summary shows."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    for rule in rules():
        yield rule["alert"], rule["expr"], re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])


async def test_every_query_reads_what_is_exported(exported: Exported) -> None:
    known = exported | OF_PROMETHEUS
    read: set[str] = set()
    for where, query, shown in queries():
        read |= promql.check(query, known, KNOWN_TO_PROMETHEUS)
        missing = set(shown) - promql.labels_of(promql.parsed(query), known, KNOWN_TO_PROMETHEUS)
        assert not missing, f"{where} shows {missing}, which {query} does not give"
    ours = {name for name in exported if name.startswith("pdserve_")}
    unseen = {name for name in ours - read if not name.endswith(("_count", "_sum", "_bucket"))}
    assert not unseen, f"on no panel and in no rule: {unseen}"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(pdserve_request_total[5m])", "nobody exports"),
        ("sum by (modle) (pdserve_requests_total)", "not there to sum by"),
        ('pdserve_workers{pool="prefil"}', "prefil"),
        ('pdserve_workers{pol="prefill"}', "no label"),
        ('pdserve_workers{state=~"dead|gone"}', "dead"),
        ("histogram_quantile(0.5, sum by (le) (rate(pdserve_queue_seconds_buckets[5m])))", "nobody exports"),
        ("sum by (le) (rate(pdserve_queue_seconds_sum[5m]))", "not there to sum by"),
        ("pdserve_requests_running + on (wrker) pdserve_requests_waiting", "wrker"),
    ],
)
async def test_a_query_that_reads_nothing_is_found(exported: Exported, query: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        promql.check(query, exported, KNOWN_TO_PROMETHEUS)


async def test_the_dashboard_is_what_its_panels_make_and_none_covers_another() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", HERE / "dashboard.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (HERE / "dashboard.json").read_text() == made.text(), "run python infra/observability/dashboard.py"
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS and panel["targets"], panel["title"]


async def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert rule["labels"]["severity"] in SEVERITIES and re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))
        assert set(rule["annotations"]) == {"summary", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md" and anchor in anchors, f"{rule['alert']}: {anchor}"


async def test_the_scrape_jobs_ask_where_the_parts_listen() -> None:
    compose = yaml.safe_load((INFRA / "compose.yaml").read_text())
    config = load_config(INFRA / "compose.toml")
    for file in ("prometheus.yaml", "prometheus-kubernetes.yaml"):
        read = yaml.safe_load((HERE / file).read_text())
        assert {job["job_name"] for job in read["scrape_configs"]} == JOBS
        (found,) = [sd["url"] for job in read["scrape_configs"] for sd in job.get("http_sd_configs", ())]
        assert found.endswith(f":{config.router.http_port}{TARGETS}")
        tls = [job["tls_config"] for job in read["scrape_configs"]]
        assert [each["server_name"] for each in tls] == ["router.pdserve", "worker.pdserve"], "the roles it expects"
        keys = {each["key_file"] for each in tls}
        if file == "prometheus.yaml":
            (mounted,) = [each for each in compose["services"]["prometheus"]["volumes"] if isinstance(each, dict)]
            assert mounted["volume"] == {"subpath": "operator"} and keys == {f"{mounted['target']}/tls.key"}
    assert config.router.metrics_open
    for settings in (config.prefill, config.decode, load_config(INFRA / "k8s" / "base" / "pdserve.toml").decode):
        assert settings.metrics_host == "" and settings.metrics_port == 8482
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["observability"] and re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for mounted in service["configs"]:
            assert (INFRA / compose["configs"][mounted["source"]]["file"]).is_file()
    targets = {mounted["target"] for mounted in compose["services"]["prometheus"]["configs"]}
    assert set(yaml.safe_load((HERE / "prometheus.yaml").read_text())["rule_files"]) <= targets


async def test_in_a_cluster_prometheus_reaches_the_pages_and_nothing_else() -> None:
    documents = list(yaml.safe_load_all(_output("kustomize", str(HERE))))
    for document in documents:
        schemas.check_by_kubernetes(document)
    (policy,) = [document for document in documents if document["kind"] == "NetworkPolicy"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8482}]
    files = {name for document in documents for name in document.get("data", {})}
    assert files == {"alerts.yaml", "dashboard.json", "prometheus-kubernetes.yaml"}
