"""What a prefill worker counts, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from pdserve.telemetry.counting import WAIT_S, Counts, Histogram
from pdserve.worker.metrics import PoolCollector, PoolCounted
from prefill_worker.scheduler import Prompt, State

if TYPE_CHECKING:
    from prefill_worker.worker import PrefillWorker

ENDS = (State.RELEASED, State.REFUSED, State.EXPIRED, State.ABORTED, State.FAILED)
OVERDUE = ("QUEUE_TIMEOUT", "LEASE_ENDED")  # reasons of overdue.py


@dataclass
class Counted(PoolCounted):
    ended: Counts = field(default_factory=lambda: Counts("outcome", known=[(str(state),) for state in ENDS]))
    reaped: Counts = field(default_factory=lambda: Counts("reason", known=[(reason,) for reason in OVERDUE]))
    queue_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))

    def begun(self, prompt: Prompt, waited_s: float) -> None:
        """A prompt has left the queue."""
        self.queue_s.observe(waited_s)
        self.looked_for(len(prompt.ids), prompt.cached)


class PrefillCollector(PoolCollector):
    def __init__(self, worker: PrefillWorker) -> None:
        super().__init__(worker)
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        make, counted = self._families, self._worker.pipeline.counted
        yield make.histogram(
            "queue_seconds", "Seconds from a prompt's arrival until it left the queue", counted.queue_s
        )
        yield make.histogram(
            "prefill_seconds", "Seconds from the first step of a prompt to its last", counted.prefill_s
        )
        yield make.counter("prefill_tokens_total", "Prompt tokens computed", counted.step_tokens.sum)
