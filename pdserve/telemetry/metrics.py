"""From what was counted to metric families, in Prometheus' names and types.

A part (router, prefill or decode worker) is a `Collector`: asked on its own event loop, it reads numbers that are
there anyway. Every family of ours begins with `pdserve_` and has the label `part`. docs/observability.md lists all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdserve.telemetry.counting import Counts, Histogram, Histograms, Labels

PREFIX = "pdserve_"


class Families:
    """Makes the families of one part."""

    def __init__(self, part: str) -> None:
        self._part = part

    def counter(self, name: str, text: str, counted: float | Counts) -> Metric:
        """`name` ends with _total."""
        labels, values = (counted.labels, counted.values) if isinstance(counted, Counts) else ((), {(): counted})
        family = CounterMetricFamily(PREFIX + name, text, labels=("part", *labels))
        for given, value in values.items():
            family.add_metric((self._part, *given), value)
        return family

    def gauge(self, name: str, text: str, values: float | Mapping[Labels, float], labels: Labels = ()) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("part", *labels))
        for given, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric((self._part, *given), value)
        return family

    def histogram(self, name: str, text: str, observed: Histogram | Histograms) -> Metric:
        labels, values = ((), {(): observed}) if isinstance(observed, Histogram) else (observed.labels, observed.values)
        family = HistogramMetricFamily(PREFIX + name, text, labels=("part", *labels))
        for given, each in values.items():
            family.add_metric((self._part, *given), _buckets(each), each.sum)
        return family

    def tasks(self) -> Metric:
        """Flat where nothing leaks."""
        tasks = "Tasks of the event loop, of all parts that share it"
        return self.gauge("event_loop_tasks", tasks, len(asyncio.all_tasks()))

    def info(self, name: str, text: str, told: Mapping[str, str]) -> Metric:
        """A 1 whose labels say what is so."""
        return self.gauge(name, text, {tuple(told.values()): 1}, tuple(told))

    def one_of(self, name: str, text: str, label: str, value: str, known: Iterable[str]) -> Metric:
        """1 for the state that holds, 0 for the others."""
        return self.gauge(name, text, {(each,): float(each == value) for each in known}, (label,))


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and how many observations lie up to each, as Prometheus wants them: cumulated, the last is +Inf."""
    cumulated, up_to = 0, []
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        cumulated += count
        up_to.append(("+Inf" if math.isinf(bound) else repr(float(bound)), float(cumulated)))
    return up_to
