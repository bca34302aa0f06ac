"""What workers of both pools count and tell in their metrics. Reads what a worker knows anyway, when it is asked to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve import __version__
from pdserve.registry.wire import STATES
from pdserve.rpc.self_report import CERTIFICATE_ENDS, GRPC, certificate
from pdserve.telemetry.counting import STEP_S, STEP_TOKENS, WAIT_S, Counts, Histogram, Labels, Refusals
from pdserve.telemetry.metrics import Families

if TYPE_CHECKING:
    from pdserve.worker.pool_worker import PoolWorker

KERNELS = ("plain", "building", "native", "failed")


@dataclass
class PoolCounted:
    """Since the worker started. Belongs to its event loop."""

    ended: Counts
    reaped: Counts
    refusals: Refusals = field(default_factory=Refusals)
    transfers: Counts = field(default_factory=lambda: Counts("outcome", known=[("ok",)]))
    transfer_bytes: int = 0
    transfer_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    prefix_queries: int = 0  # tokens that were looked for
    prefix_hits: int = 0  # and found

    def looked_for(self, tokens: int, found: int) -> None:
        self.prefix_queries += tokens
        self.prefix_hits += found

    def handed_over(self, payload_bytes: int, seconds: float) -> None:
        """A cache was sent, or came, whole."""
        self.transfers.add("ok")
        self.transfer_bytes += payload_bytes
        self.transfer_s.observe(seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """In one step of the engine."""
        self.step_s.observe(seconds)
        self.step_tokens.observe(tokens)


class PoolCollector(Collector):
    """Subclasses add what is their pool's own."""

    def __init__(self, worker: PoolWorker) -> None:
        self._pool_worker = worker
        self._families = Families(worker.role)

    def collect(self) -> Iterator[Metric]:
        worker, make = self._pool_worker, self._families
        record = worker.record()
        load = record.load
        yield make.info("build_info", "1; the version as a label", {"version": __version__})
        yield make.tasks()
        tls = worker.prober.tls
        ends: dict[Labels, float] = {(GRPC,): certificate(GRPC, tls).not_after_s} if tls.enabled else {}
        yield make.gauge("certificate_not_after_seconds", CERTIFICATE_ENDS, ends, ("listener",))
        yield make.one_of("worker_state", "1 for the state the worker is in", "state", worker.state, STATES)
        yield make.gauge("registry_up", "1 while the registry takes this worker's heartbeats", float(worker.heard))
        yield make.gauge("requests_running", "Requests that hold pages", load.running)
        yield make.gauge("requests_waiting", "Requests in the queue", load.waiting)
        yield make.gauge("requests_waiting_limit", "Bound of the queue", load.waiting_limit)
        yield make.gauge("queued_tokens", "Prompt tokens of requests here that are still to come", load.queued_tokens)
        wait = "Seconds before a prompt as long as the longest step would begin"
        yield make.gauge("predicted_wait_seconds", wait, load.predicted_wait_s)
        free = load.pages_total - load.pages_held - load.pages_cached
        pages: dict[Labels, float] = {("free",): free, ("held",): load.pages_held, ("cached",): load.pages_cached}
        yield make.gauge("kv_cache_pages", "Pages of the pool by what is in them", pages, ("state",))
        used = load.pages_held / load.pages_total if load.pages_total else 0.0
        yield make.gauge("kv_cache_usage_ratio", "Part of the pool that requests hold", used)
        yield make.gauge("adapters_loaded", "LoRA adapters in memory, replaced ones included", worker.adapters.count)
        yield make.counter("engine_steps_total", "Functions that the engine's thread has run", load.steps)
        busy = "Seconds that the engine's running step has taken so far; 0: idle"
        yield make.gauge("engine_busy_seconds", busy, worker.busy_s)
        kernels = worker.kernels().state
        yield make.one_of("kernels", "1 for the kernels that compute here", "state", kernels, KERNELS)
        yield from self._events(worker.pipeline.counted)

    def _events(self, counted: PoolCounted) -> Iterator[Metric]:
        make = self._families
        yield make.counter("refusals_total", "Requests refused before they could wait", counted.refusals)
        yield make.counter("worker_requests_total", "Requests that ended, by how", counted.ended)
        yield make.counter("leases_reaped_total", "Requests ended because their time was over", counted.reaped)
        looked = "Tokens looked for in the prefix index"
        yield make.counter("prefix_cache_queries_total", looked, counted.prefix_queries)
        yield make.counter("prefix_cache_hits_total", "Tokens found in the prefix index", counted.prefix_hits)
        yield make.histogram("engine_step_seconds", "Seconds of an engine step", counted.step_s)
        yield make.histogram("engine_step_tokens", "Tokens computed in an engine step", counted.step_tokens)
        yield make.counter("transfers_total", "Handoffs by outcome: ok, or the error's reason", counted.transfers)
        payload = "Payload of caches that were acknowledged (prefill) or arrived whole (decode)"
        yield make.counter("transfer_bytes_total", payload, counted.transfer_bytes)
        lasted = "Seconds from a grant to the acknowledgement (prefill) or the verified cache (decode)"
        yield make.histogram("transfer_seconds", lasted, counted.transfer_s)
