"""Metrics for OpenTelemetry: `tidegate.opentelemetry.instrument()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from tidegate._limiter import limiters
from tidegate._metrics import COUNTERS, GAUGES, LABELLED, samples

Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _plain(name: str) -> Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for limiter, sample in samples(limiters()).items():
            yield Observation(sample.values[name], {"limiter": limiter})

    return observe


def _labelled(name: str, labels: tuple[str, ...]) -> Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for limiter, sample in samples(limiters()).items():
            for key, value in sample.labelled[name].items():
                yield Observation(value, {"limiter": limiter, **dict(zip(labels, key, strict=True))})

    return observe


def instrument(meter: Meter | None = None) -> None:
    """Exports every named limiter of this process, those made later too, as observable instruments."""
    to = get_meter("tidegate") if meter is None else meter
    for name, text in GAUGES.items():
        to.create_observable_gauge(f"tidegate.limiter.{name}", [_plain(name)], description=text)
    for name, text in COUNTERS.items():
        to.create_observable_counter(f"tidegate.limiter.{name}", [_plain(name)], description=text)
    for name, (labels, text) in LABELLED.items():
        to.create_observable_counter(f"tidegate.limiter.{name}", [_labelled(name, labels)], description=text)
