"""What a decode worker counts, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from cache_transfer.receiver import ReceiveReport
from decode_worker.sequence import State
from pdserve.registry.pool_metrics import PoolCollector
from pdserve.telemetry.counting import STEP_S, STEP_TOKENS, WAIT_S, Counts, Histogram, Refusals

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker

ENDS = (State.DONE, State.EXPIRED, State.ABORTED, State.FAILED)
OVERDUE = ("TICKET_EXPIRED", "RECEIVE_TIMEOUT", "GENERATE_TIMEOUT", "SLOW_READER")


@dataclass
class Counted:
    """Since the worker started. Belongs to its event loop."""

    refusals: Refusals = field(default_factory=Refusals)
    ended: Counts = field(default_factory=lambda: Counts("outcome", known=[(str(state),) for state in ENDS]))
    reaped: Counts = field(default_factory=lambda: Counts("reason", known=[(reason,) for reason in OVERDUE]))
    transfers: Counts = field(default_factory=lambda: Counts("outcome", known=[("ok",)]))
    transfer_bytes: int = 0
    transfer_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    decode_tokens: int = 0
    prefix_queries: int = 0  # tokens that were looked for
    prefix_hits: int = 0  # and found

    def looked_for(self, tokens: int, found: int) -> None:
        self.prefix_queries += tokens
        self.prefix_hits += found

    def received(self, report: ReceiveReport, logits_bytes: int) -> None:
        """A cache arrived whole."""
        self.transfers.add("ok")
        self.transfer_bytes += report.payload_bytes + logits_bytes
        self.transfer_s.observe(report.seconds)

    def stepped(self, tokens: int, given: int, seconds: float) -> None:
        """Of `tokens` computed, and `given` out; 0 tokens: only first ones were sampled, without the model."""
        self.decode_tokens += given
        if tokens:
            self.step_s.observe(seconds)
            self.step_tokens.observe(tokens)


class DecodeCollector(PoolCollector):
    def __init__(self, worker: DecodeWorker) -> None:
        super().__init__(worker)
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        make, pipeline = self._families, self._worker.pipeline
        counted, scheduler, memory = pipeline.counted, pipeline.scheduler, pipeline.scheduler.counters
        yield make.counter("refusals_total", "Requests refused before they could wait", counted.refusals)
        yield make.counter("worker_requests_total", "Requests that ended, by how", counted.ended)
        yield make.counter("leases_reaped_total", "Requests ended because their time was over", counted.reaped)
        yield make.counter("decode_tokens_total", "Tokens sampled", counted.decode_tokens)
        yield make.counter("prefill_tokens_total", "Prompt tokens computed", scheduler.prompts.computed)
        again = "Tokens computed again after a preemption"
        yield make.counter("recomputed_tokens_total", again, scheduler.recomputed_tokens)
        yield make.counter(
            "prefix_cache_queries_total", "Tokens looked for in the prefix index", counted.prefix_queries
        )
        yield make.counter("prefix_cache_hits_total", "Tokens found in the prefix index", counted.prefix_hits)
        yield make.histogram("engine_step_seconds", "Seconds of an engine step", counted.step_s)
        yield make.histogram("engine_step_tokens", "Tokens computed in an engine step", counted.step_tokens)
        yield make.counter("transfers_total", "Handoffs by outcome: ok, or the error's reason", counted.transfers)
        yield make.counter("transfer_bytes_total", "Payload of caches that arrived whole", counted.transfer_bytes)
        yield make.histogram("transfer_seconds", "Seconds from a grant to the verified cache", counted.transfer_s)
        yield make.counter("preemptions_total", "Times a sequence lost its pages to another", memory.preemptions)
        yield make.counter("forks_total", "Outputs that began on the shared cache of their prompt", memory.forks)
        yield make.counter("shared_pages_total", "Pages that these took over, counted for each", memory.shared_pages)
        yield make.counter("copied_pages_total", "Of these, pages copied before one of them wrote", memory.copied_pages)
