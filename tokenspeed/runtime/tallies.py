"""Counters and histograms that cost the one thread which counts an addition, and become Prometheus families at a scrape.

What they export is, sample for sample, what prometheus_client's own of that name and those buckets would; those take a
lock and a method call for each bucket an observation, which a server that observes every token feels.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._created = time.time()
        self._value = 0

    def add(self, count: int) -> None:
        self._value += count

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self._value, created=self._created)
        yield family


class Spread(Collector):
    """A histogram."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        """`bounds`: the buckets' upper ends, ascending, without infinity."""
        self._name, self._text, self._labels = name, text, labels
        self._created = time.time()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets, below = list[tuple[str, float]](), 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(self._name + "_created", dict(self._labels), self._created)
        yield family
