"""What a prefill worker counts, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from cache_transfer.sender import SendReport
from pdserve.registry.pool_metrics import PoolCollector
from pdserve.telemetry.counting import STEP_S, STEP_TOKENS, WAIT_S, Counts, Histogram, Refusals
from prefill_worker.scheduler import Prompt, State

if TYPE_CHECKING:
    from prefill_worker.worker import PrefillWorker

ENDS = (State.RELEASED, State.REFUSED, State.EXPIRED, State.ABORTED, State.FAILED)
QUEUE_TIMEOUT, LEASE_ENDED = OVERDUE = ("QUEUE_TIMEOUT", "LEASE_ENDED")


@dataclass
class Counted:
    """Since the worker started. Belongs to its event loop."""

    refusals: Refusals = field(default_factory=Refusals)
    ended: Counts = field(default_factory=lambda: Counts("outcome", known=[(str(state),) for state in ENDS]))
    reaped: Counts = field(default_factory=lambda: Counts("reason", known=[(reason,) for reason in OVERDUE]))
    transfers: Counts = field(default_factory=lambda: Counts("outcome", known=[("ok",)]))
    transfer_bytes: int = 0
    transfer_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    prefix_queries: int = 0  # tokens that were looked for
    prefix_hits: int = 0  # and found

    def begun(self, prompt: Prompt, waited_s: float) -> None:
        """A prompt has left the queue."""
        self.queue_s.observe(waited_s)
        self.prefix_queries += len(prompt.ids)
        self.prefix_hits += prompt.cached

    def stepped(self, tokens: int, seconds: float) -> None:
        self.step_s.observe(seconds)
        self.step_tokens.observe(tokens)

    def sent(self, report: SendReport, logits_bytes: int) -> None:
        """A handoff was acknowledged."""
        self.transfers.add("ok")
        self.transfer_bytes += report.payload_bytes + logits_bytes
        self.transfer_s.observe(report.ack_at - report.granted_at)


class PrefillCollector(PoolCollector):
    def __init__(self, worker: PrefillWorker) -> None:
        super().__init__(worker)
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        make, counted = self._families, self._worker.pipeline.counted
        yield make.counter("refusals_total", "Requests refused before they could wait", counted.refusals)
        yield make.counter("worker_requests_total", "Requests that ended, by how", counted.ended)
        yield make.counter("leases_reaped_total", "Requests ended because their time was over", counted.reaped)
        yield make.histogram(
            "queue_seconds", "Seconds from a prompt's arrival until it left the queue", counted.queue_s
        )
        yield make.histogram(
            "prefill_seconds", "Seconds from the first step of a prompt to its last", counted.prefill_s
        )
        yield make.counter("prefill_tokens_total", "Prompt tokens computed", counted.step_tokens.sum)
        yield make.counter(
            "prefix_cache_queries_total", "Tokens looked for in the prefix index", counted.prefix_queries
        )
        yield make.counter("prefix_cache_hits_total", "Tokens found in the prefix index", counted.prefix_hits)
        yield make.histogram("engine_step_seconds", "Seconds of an engine step", counted.step_s)
        yield make.histogram("engine_step_tokens", "Tokens computed in an engine step", counted.step_tokens)
        yield make.counter("transfers_total", "Handoffs by outcome: ok, or the error's reason", counted.transfers)
        yield make.counter("transfer_bytes_total", "Payload of acknowledged handoffs", counted.transfer_bytes)
        yield make.histogram("transfer_seconds", "Seconds from a grant to its acknowledgement", counted.transfer_s)
