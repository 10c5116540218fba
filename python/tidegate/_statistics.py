"""What a limiter knows at one instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate._call import Call
    from tidegate._core import Snapshot


@dataclass(frozen=True, slots=True)
class LimiterStatistics:
    """Counts in calls, times in seconds; all of one instant but `borrowers`. The names that anyio's and trio's
    `CapacityLimiter` use come first.

    `running = attended + abandoned`, `offered = rejected + queued + started + cancelled_before_start`,
    `started = running + lingering + finished`."""

    borrowed_tokens: int
    """Calls that hold a slot: `running + lingering`."""
    total_tokens: int
    """The limit."""
    borrowers: tuple[Call[Any], ...]
    """The calls that hold a slot."""
    tasks_waiting: int
    """Calls in the queue."""

    hard_limit: int
    queue_limit: int
    running: int
    attended: int
    """Running calls that somebody waits for."""
    abandoned: int
    """Running calls that nobody waits for."""
    lingering: int
    oldest_queued: float | None
    oldest_running: float | None
    oldest_abandoned: float | None
    closed: bool
    overloaded: bool
    leftovers_block: bool
    """Abandoned work is all that keeps the next call from starting."""

    offered: int
    rejected: int
    started: int
    finished: int
    finished_abandoned: int
    """Those of `finished` whose waiter had left."""
    cancelled_before_start: int
    abandoned_total: int
    severed_total: int
    """Sockets shut down under abandoned calls."""
    queued_seconds: float
    """The integral of `tasks_waiting` over time; the next two likewise."""
    running_seconds: float
    abandoned_seconds: float

    rejected_by_reason: dict[str, int]
    left_by_reason: dict[str, int]
    finished_by_outcome: dict[str, tuple[int, int]]
    """`ok`, `error`, `cancelled`, `panicked` (raised no `Exception`), `dropped`: attended and abandoned."""


def of(now: Snapshot, borrowers: tuple[Call[Any], ...], severed: int) -> LimiterStatistics:
    return LimiterStatistics(
        borrowed_tokens=now["running"] + now["lingering"],
        total_tokens=now["limit"],
        borrowers=borrowers,
        tasks_waiting=now["queued"],
        hard_limit=now["hard_limit"],
        queue_limit=now["queue_limit"],
        running=now["running"],
        attended=now["attended"],
        abandoned=now["abandoned"],
        lingering=now["lingering"],
        oldest_queued=now["oldest_queued"],
        oldest_running=now["oldest_running"],
        oldest_abandoned=now["oldest_abandoned"],
        closed=now["closed"],
        overloaded=now["overloaded"],
        leftovers_block=now["leftovers_block"],
        offered=now["offered"],
        rejected=now["rejected"],
        started=now["started"],
        finished=now["finished"],
        finished_abandoned=now["finished_abandoned"],
        cancelled_before_start=now["cancelled_before_start"],
        abandoned_total=now["abandoned_total"],
        severed_total=severed,
        queued_seconds=now["queued_seconds"],
        running_seconds=now["running_seconds"],
        abandoned_seconds=now["abandoned_seconds"],
        rejected_by_reason=now["rejected_by_reason"],
        left_by_reason=now["left_by_reason"],
        finished_by_outcome=now["ended_by_outcome"],
    )
