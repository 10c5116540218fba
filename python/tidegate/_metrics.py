"""The names of the metrics, and their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate._limiter import Limiter

GAUGES = {
    "limit": "The most calls that somebody waits for.",
    "hard_limit": "The most calls that really run.",
    "queue_limit": "The most calls in the queue.",
    "queued": "Calls in the queue.",
    "attended": "Running calls that somebody waits for.",
    "abandoned": "Running calls that nobody waits for.",
    "oldest_abandoned_seconds": "How long ago the waiter of the longest abandoned call left; 0 without one.",
}
COUNTERS = {
    "offered": "Calls offered.",
    "started": "Calls that got a slot.",
    "left_by_waiter": "Running calls whose waiter left.",
    "severed": "Sockets shut down under abandoned calls.",
    "queued_seconds": "Call-seconds spent in the queue.",
    "running_seconds": "Call-seconds that slots were held.",
    "abandoned_seconds": "Call-seconds that slots were held for nobody.",
}
LABELLED: dict[str, tuple[tuple[str, ...], str]] = {
    "rejected": (("reason",), "Calls turned down at once."),
    "cancelled_before_start": (("by",), "Queued calls that left without a slot."),
    "finished": (("outcome", "attended"), "Calls whose work ended."),
}


@dataclass
class Sample:
    """The sum over the limiters of one name."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys([*GAUGES, *COUNTERS], 0.0))
    labelled: dict[str, dict[tuple[str, ...], float]] = field(
        default_factory=lambda: {name: dict[tuple[str, ...], float]() for name in LABELLED}
    )

    def add(self, limiter: Limiter) -> None:
        now = limiter.statistics()
        oldest = now.oldest_abandoned or 0.0
        for name, value in {
            "limit": now.total_tokens,
            "hard_limit": now.hard_limit,
            "queue_limit": now.queue_limit,
            "queued": now.tasks_waiting,
            "attended": now.attended,
            "abandoned": now.abandoned,
            "offered": now.offered,
            "started": now.started,
            "left_by_waiter": now.abandoned_total,
            "severed": now.severed_total,
            "queued_seconds": now.queued_seconds,
            "running_seconds": now.running_seconds,
            "abandoned_seconds": now.abandoned_seconds,
        }.items():
            self.values[name] += value
        self.values["oldest_abandoned_seconds"] = max(self.values["oldest_abandoned_seconds"], oldest)
        for reason, count in now.rejected_by_reason.items():
            self._count("rejected", (reason,), count)
        for by, count in now.left_by_reason.items():
            self._count("cancelled_before_start", (by,), count)
        for outcome, (attended, abandoned) in now.finished_by_outcome.items():
            self._count("finished", (outcome, "true"), attended)
            self._count("finished", (outcome, "false"), abandoned)

    def _count(self, name: str, key: tuple[str, ...], count: int) -> None:
        self.labelled[name][key] = self.labelled[name].get(key, 0) + count


def samples(limiters: Iterable[Limiter]) -> dict[str, Sample]:
    """By name; limiters without one are left out."""
    found: dict[str, Sample] = {}
    for limiter in limiters:
        if limiter.name:
            found.setdefault(limiter.name, Sample()).add(limiter)
    return found
