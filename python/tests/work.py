"""Work for the tests, that ends when it is told to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from server import until

import tidegate


class Work:
    """A function that blocks until it is released, and counts how many of it really run at once."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started = 0
        self.active = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, value: Any = None) -> Any:
        with self._lock:
            self.started += 1
            self.active += 1
            self.most = max(self.most, self.active)
        self.release.wait(300)
        with self._lock:
            self.active -= 1
        return value


@contextmanager
def blocking() -> Iterator[Work]:
    work = Work()
    try:
        yield work
    finally:
        work.release.set()
        until(lambda: work.active == 0)


def frames(call: tidegate.Call[Any]) -> list[str]:
    """The functions that the call's thread is inside of, innermost first."""
    frame = sys._current_frames().get(call.thread or 0)
    names: list[str] = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def reads(call: tidegate.Call[Any]) -> bool:
    """Whether its thread is in a read of a socket."""
    return frames(call)[:1] in (["read"], ["readinto"], ["recv"], ["recv_into"])


def idle(limiter: tidegate.Limiter) -> bool:
    """Waits until nothing runs or is queued. Whether the sums hold."""
    until(lambda: limiter.statistics().borrowed_tokens == 0 and limiter.statistics().tasks_waiting == 0)
    balanced(limiter)
    return True


def balanced(limiter: tidegate.Limiter) -> None:
    assert limiter._ledger.snapshot()["broken_identity"] is None
    now = limiter.statistics()
    assert now.running == now.attended + now.abandoned
    assert now.offered == now.rejected + now.tasks_waiting + now.started + now.cancelled_before_start
    assert now.started == now.running + now.lingering + now.finished


def raising(error: BaseException) -> Callable[[], None]:
    def fn() -> None:
        raise error

    return fn
