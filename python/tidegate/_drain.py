"""What still runs: in the report of a drain, in a dump, at exit."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate._waits import settled

if TYPE_CHECKING:
    from tidegate._call import Call
    from tidegate._limiter import Limiter


@dataclass(frozen=True, slots=True)
class Leftover:
    """A call whose work had not ended. Times in seconds."""

    number: int
    label: str
    age: float
    abandoned_for: float | None
    """Since its waiter left, if it has."""
    stack: str
    """Where its thread is, innermost last. Empty if it has none of its own."""

    def __str__(self) -> str:
        waited = "somebody waits" if self.abandoned_for is None else f"nobody has waited for {self.abandoned_for:.1f} s"
        return f"call {self.number} {self.label!r}, running for {self.age:.1f} s, {waited}"


@dataclass(frozen=True, slots=True)
class DrainReport:
    finished: int
    """Calls that ended while it waited."""
    cancelled: int
    """Queued calls that were sent away at the deadline, or had left before."""
    still_running: tuple[Leftover, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing was left behind."""
        return not self.still_running and not self.cancelled


def leftovers(limiter: Limiter) -> tuple[Leftover, ...]:
    """What runs now."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return tuple(_leftover(call, frames) for call in limiter.statistics().borrowers)


def _leftover(call: Call[Any], frames: dict[int, Any]) -> Leftover:
    now = time.monotonic()
    frame = frames.get(call.thread) if call.thread is not None else None
    # The first three are the thread's own way to the work.
    stack = "" if frame is None else "".join(traceback.format_stack(frame))
    return Leftover(
        number=call.number,
        label=call.label,
        age=now - (call.started_at or now),
        abandoned_for=None if call.abandoned_at is None else now - call.abandoned_at,
        stack=stack,
    )


def dump(limiter: Limiter) -> str:
    now = limiter.statistics()
    lines = [
        f"{limiter!r}: {now.attended} attended and {now.abandoned} abandoned of {now.total_tokens}, "
        f"{now.tasks_waiting} queued of {now.queue_limit}\n"
    ]
    for left in leftovers(limiter):
        lines.append(f"{left}\n{left.stack}")
    return "".join(lines)


def drain(limiter: Limiter, timeout: float) -> DrainReport:
    from tidegate._terms import check_seconds

    seconds = check_seconds("timeout", timeout)
    before = limiter.statistics()
    limiter.seal()
    idle = limiter.idle()
    try:
        idle.exception(seconds)
    except Exception:  # out of time; the class depends on the version of Python
        idle.cancel()
    return _report(limiter, before.finished, before.cancelled_before_start)


async def adrain(limiter: Limiter, timeout: float) -> DrainReport:
    from tidegate._terms import check_seconds

    seconds = check_seconds("timeout", timeout)
    before = limiter.statistics()
    limiter.seal()
    idle = limiter.idle()
    await settled(idle, seconds)
    idle.cancel()
    return _report(limiter, before.finished, before.cancelled_before_start)


def _report(limiter: Limiter, finished: int, cancelled: int) -> DrainReport:
    limiter.close()
    after = limiter.statistics()
    return DrainReport(after.finished - finished, after.cancelled_before_start - cancelled, leftovers(limiter))


def at_exit() -> None:
    """Names what the process leaves behind. It is not waited for."""
    from tidegate._limiter import limiters

    for limiter in limiters():
        left = leftovers(limiter)
        if left and sys.stderr is not None:
            calls = "1 call" if len(left) == 1 else f"{len(left)} calls"
            named = "".join(f"\n  {one}" for one in left)
            print(f"tidegate: {limiter!r} leaves {calls} running at exit:{named}", file=sys.stderr)
