"""The router's metrics: what it has counted, read when somebody asks, and where the workers' pages are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve import __version__
from pdserve.registry.records import DECODE, PREFILL, READY
from pdserve.registry.wire import STATES
from pdserve.rpc.self_report import CERTIFICATE_ENDS, GRPC, HTTP, certificate
from pdserve.telemetry.counting import Counts, Histogram, Labels
from pdserve.telemetry.exporter import PATH, MetricsPage
from pdserve.telemetry.metrics import Families
from router.outcomes import BOUNDS, Outcomes
from router.pool import Pool
from router.shared_quotas import QuotaShare
from router.sharing import Sharing

if TYPE_CHECKING:
    from router.app import Router

TARGETS = f"{PATH}/targets"
SUSPECT = "suspect"  # a worker in state READY that gets no work, see pool.py


class RouterCollector(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router
        self._families = Families("router")

    def collect(self) -> Iterator[Metric]:
        router = self._router
        make, settings = self._families, router.settings
        yield make.info("build_info", "1; the version as a label", {"version": __version__})
        yield make.tasks()
        listeners = {GRPC: settings.rpc.tls, HTTP: settings.http_tls} if settings.rpc.tls.enabled else {}
        ends: dict[Labels, float] = {(name,): certificate(name, tls).not_after_s for name, tls in listeners.items()}
        yield make.gauge("certificate_not_after_seconds", CERTIFICATE_ENDS, ends, ("listener",))
        yield from self._of_pool(router.pool)
        yield from self._of_sharing(router.sharing, router.quota_sharing)
        yield from self._of_requests(router.orchestrator.outcomes, router.orchestrator.active)
        yield from self._of_placement(router.orchestrator.outcomes)

    def _of_pool(self, pool: Pool) -> Iterator[Metric]:
        make = self._families
        yield make.gauge("registry_up", "1 while snapshots of the registry work", float(not pool.warning))
        yield make.gauge("registry_snapshot_age_seconds", "Seconds since the last snapshot", pool.snapshot_age_s)
        workers: Counter[Labels] = Counter(
            {(role, state): 0 for role in (PREFILL, DECODE) for state in (*STATES, SUSPECT)}
        )
        for member in pool.members():
            out = member.record.state == READY and not pool.is_ready(member)
            workers[member.record.role, SUSPECT if out else member.record.state] += 1
        yield make.gauge("workers", "Workers that this router knows", workers, ("pool", "state"))
        models: dict[Labels, float] = {(name,): float(bool(pool.verdict(name).matches)) for name in pool.models()}
        yield make.gauge("model_ready", "1 while a pair of workers fits for the model", models, ("model",))

    def _of_sharing(self, prefixes: Sharing | None, limits: QuotaShare | None) -> Iterator[Metric]:
        make = self._families
        troubled = any(share is not None and share.warning for share in (prefixes, limits))
        works = "0 while this router cannot exchange with others on its Redis: where prompts went, what tenants used"
        yield make.gauge("sharing_up", works, float(not troubled))
        odd = "What was read where routers tell each other of limits, and no router wrote"
        yield make.counter("sharing_ignored_total", odd, 0 if limits is None else limits.ignored)

    def _of_requests(self, outcomes: Outcomes, active: int) -> Iterator[Metric]:
        make, told = self._families, outcomes.traffic
        yield make.gauge("requests_running", "Requests in flight", active)
        yield make.gauge("requests_running_limit", "router.max_active", self._router.settings.max_active)
        ended = "Checked requests by how they ended: the finish reason, or the error's reason"
        yield make.counter("requests_total", ended, told.requests)
        refusals = "Requests refused before a worker was asked, by the error's reason and the field at fault"
        yield make.counter("refusals_total", refusals, _sum(told.refusals, self._router.authenticator.refusals))
        first = "Seconds from a request's arrival to its first token"
        yield make.histogram("time_to_first_token_seconds", first, told.first_token_s)
        between = "Seconds between two tokens of an output; those that come together share the time"
        yield make.histogram("inter_token_latency_seconds", between, told.inter_token_s)
        yield make.histogram("e2e_request_latency_seconds", "Seconds from arrival to end", told.request_s)
        yield make.counter("prompt_tokens_total", "Prompt tokens of requests that ended", told.prompt_tokens)
        yield make.counter("generation_tokens_total", "Output tokens of requests that ended", told.generation_tokens)
        yield make.counter("tenant_requests_total", "Checked requests of a tenant", told.tenant_requests)
        yield make.counter("tenant_tokens_total", "Tokens of a tenant's requests", told.tenant_tokens)
        quota = "Requests refused because of a tenant's limits"
        yield make.counter("quota_refusals_total", quota, told.quota_refusals)

    def _of_placement(self, outcomes: Outcomes) -> Iterator[Metric]:
        make, told = self._families, outcomes.traffic
        placed = Counts("where")
        placed.add(PREFILL, by=outcomes.handed_over - outcomes.split)
        placed.add("both", by=outcomes.split)
        placed.add(DECODE, by=outcomes.computed_at_decode)
        yield make.counter("placements_total", "Attempts by the pool that computes the prompt, or both", placed)
        forced = "Of those at decode: for want of a prefill worker"
        yield make.counter("placement_fallbacks_total", forced, outcomes.fallbacks)
        cheaper = "Of those at decode: because it was predicted to be cheaper"
        yield make.counter("placement_cheaper_total", cheaper, outcomes.cheaper)
        ratios = Histogram(BOUNDS)
        ratios.counts, ratios.sum = outcomes.ratios, outcomes.ratio_sum
        foreseen = "Time to the first token over the predicted one, of predictions from measured rates"
        yield make.histogram("placement_prediction_ratio", foreseen, ratios)
        failed = "Attempts that failed, by the pool of the worker at fault and the error's reason"
        yield make.counter("attempt_failures_total", failed, told.failures)
        yield make.counter("resumes_total", "Attempts that went on with an answer that had begun", told.resumes)


class MetricsPages:
    """GET /metrics, and GET /metrics/targets: the workers' pages, as Prometheus' HTTP service discovery reads them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._page = MetricsPage(RouterCollector(router))

    def routes(self) -> list[Route]:
        router = self._router
        pages = ((PATH, self._metrics), (TARGETS, self._targets))
        everyone = router.settings.metrics_open
        return [Route(path, router.operators.only(serve, everyone=everyone)) for path, serve in pages]

    async def _metrics(self, http: Request) -> Response:
        body, content_type = self._page.render(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _targets(self, http: Request) -> Response:
        scheme = "https" if self._router.settings.rpc.tls.enabled else "http"
        records = [member.record for member in self._router.pool.members() if member.record.metrics]
        return JSONResponse(
            [
                {
                    "targets": [record.metrics],
                    "labels": {"__scheme__": scheme, "worker": record.worker_id, "model": record.model},
                }
                for record in records
            ]
        )


def _sum(first: Counts, second: Counts) -> Counts:
    total = Counts(*first.labels)
    total.values = dict(Counter(first.values) + Counter(second.values))
    return total
