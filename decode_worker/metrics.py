"""What a decode worker counts, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from decode_worker.sequence import State
from pdserve.telemetry.counting import Counts
from pdserve.worker.metrics import PoolCollector, PoolCounted

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker

ENDS = (State.DONE, State.EXPIRED, State.ABORTED, State.FAILED)
OVERDUE = ("TICKET_EXPIRED", "RECEIVE_TIMEOUT", "GENERATE_TIMEOUT", "SLOW_READER")


@dataclass
class Counted(PoolCounted):
    ended: Counts = field(default_factory=lambda: Counts("outcome", known=[(str(state),) for state in ENDS]))
    reaped: Counts = field(default_factory=lambda: Counts("reason", known=[(reason,) for reason in OVERDUE]))
    decode_tokens: int = 0

    def stepped(self, tokens: int, given: int, seconds: float) -> None:
        """Of `tokens` computed, and `given` out; 0 tokens: only first ones were sampled, without the model."""
        self.decode_tokens += given
        if tokens:
            self.computed(tokens, seconds)


class DecodeCollector(PoolCollector):
    def __init__(self, worker: DecodeWorker) -> None:
        super().__init__(worker)
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        make, pipeline = self._families, self._worker.pipeline
        counted, scheduler, memory = pipeline.counted, pipeline.scheduler, pipeline.scheduler.counters
        yield make.counter("decode_tokens_total", "Tokens sampled", counted.decode_tokens)
        yield make.counter("prefill_tokens_total", "Prompt tokens computed", scheduler.prompts.computed)
        again = "Tokens computed again after a preemption"
        yield make.counter("recomputed_tokens_total", again, scheduler.recomputed_tokens)
        yield make.counter("preemptions_total", "Times a sequence lost its pages to another", memory.preemptions)
        yield make.counter("forks_total", "Outputs that began on the shared cache of their prompt", memory.forks)
        yield make.counter("shared_pages_total", "Pages that these took over, counted for each", memory.shared_pages)
        yield make.counter("copied_pages_total", "Of these, pages copied before one of them wrote", memory.copied_pages)
