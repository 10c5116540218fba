"""Metrics for `prometheus_client`: `tidegate.prometheus.register()`. All numbers of a limiter are of one instant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidegate._limiter import limiters
from tidegate._metrics import COUNTERS, GAUGES, LABELLED, samples


class LimiterCollector(Collector):
    """Every limiter that has a name, under the label `limiter`. Those of one name are added up."""

    def collect(self) -> Iterator[Metric]:
        found = samples(limiters())
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"tidegate_limiter_{name}", text, labels=["limiter"])
            for limiter, sample in found.items():
                gauge.add_metric([limiter], sample.values[name])
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"tidegate_limiter_{name}", text, labels=["limiter"])
            for limiter, sample in found.items():
                counter.add_metric([limiter], sample.values[name])
            yield counter
        for name, (labels, text) in LABELLED.items():
            counter = CounterMetricFamily(f"tidegate_limiter_{name}", text, labels=["limiter", *labels])
            for limiter, sample in found.items():
                for key, value in sample.labelled[name].items():
                    counter.add_metric([limiter, *key], value)
            yield counter

    def describe(self) -> list[Any]:
        return []


def register(registry: CollectorRegistry = REGISTRY) -> LimiterCollector:
    """Exports every named limiter of this process, those made later too."""
    collector = LimiterCollector()
    registry.register(collector)
    return collector
