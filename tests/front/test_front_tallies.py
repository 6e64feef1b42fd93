"""What tallies export equals what prometheus_client's own counters and histograms do, sample for sample."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from tokenspeed.runtime.tallies import Spread, Tally

LABELS = {"model_name": "m"}
BOUNDS = (0.5, 1, 2.5, 1000)


def told(registry: CollectorRegistry) -> list[tuple[str, str, str, list[object]]]:
    """All families; of when a series began only that it is there."""

    def samples(family: Metric) -> list[object]:
        return [
            (s.name, s.labels, s.value > 0 if s.name.endswith("_created") else round(s.value, 9))
            for s in family.samples
        ]

    return [(family.name, family.documentation, family.type, samples(family)) for family in registry.collect()]


def test_a_scrape_equals_that_of_the_client_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, spread = Tally("t:tokens", "Tokens", LABELS), Spread("t:seconds", "Seconds", LABELS, BOUNDS)
    ours.register(tally)
    ours.register(spread)
    counter = Counter("t:tokens", "Tokens", ["model_name"], registry=theirs).labels("m")
    histogram = Histogram("t:seconds", "Seconds", ["model_name"], buckets=BOUNDS, registry=theirs).labels("m")
    assert told(ours) == told(theirs)
    rng = random.Random(5)
    for value in [*BOUNDS, 0, 1e9, *(rng.expovariate(0.1) for _ in range(200))]:
        times = rng.randint(1, 3)
        tally.add(times)
        counter.inc(times)
        spread.observe(value, times)
        for _ in range(times):
            histogram.observe(value)
    assert told(ours) == told(theirs)
