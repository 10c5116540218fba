"""The threads that work off calls which have their slots, and the one that keeps the time of the queue."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from tidegate._core import Crew

if TYPE_CHECKING:
    from tidegate._call import Call

KEEP = 10.0
"""How long an idle thread is kept, in seconds."""


class Workers:
    """Threads of one limiter: never more than slots have been held at once, and one for each that is busy with what
    somebody has it do when a call is done. None is ever joined."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._crew = Crew()
        self.add: Callable[[], bool] = self._crew.add
        """Counts one more call. Whether it needs a new thread."""
        self.done: Callable[[], None] = self._crew.done
        """The work of a call is over, and its thread about to be free."""
        self.failed: Callable[[], bool] = self._crew.failed
        """A thread that was counted has not been started. Whether there are others: if not, its call is not counted."""
        self._jobs: SimpleQueue[Call[Any]] = SimpleQueue()
        self.take: Callable[[Call[Any]], None] = self._jobs.put
        """Has a thread that is there work off the call, which has its slot and was counted."""
        self._numbers = itertools.count(1)

    @property
    def threads(self) -> int:
        return self._crew.threads

    def hire(self, call: Call[Any]) -> None:
        """Works off the call on a new thread; if the system gives none, on one that is there once it is free.

        Raises RuntimeError if there is none either; the call has not started then."""
        name = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, args=([call],), name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            call.hiring = False
            if not self.failed():
                raise
            self.take(call)
        call.hiring = False

    def _run(self, first: list[Call[Any]]) -> None:
        call: Call[Any] | None = first.pop()  # as the thread keeps its arguments for all its life
        while call is not None:
            try:
                if call.begin():
                    call.work()
                else:
                    call.limiter.passed_over(call)
            except BaseException:  # out of what somebody else has it do when it is done: no thread ends by that
                logging.getLogger("tidegate").exception("a callback of %r failed", call)
                call.limiter.look_idle()
            call = None  # an idle thread keeps nothing alive
            if os.getpid() != self._process:
                return  # the work has forked, and this is the child
            call = self._next()

    def _next(self) -> Call[Any] | None:
        while True:
            try:
                return self._jobs.get(timeout=KEEP)
            except Empty:
                if self._crew.retire():
                    return None


class Timer:
    """One thread for the queue timeouts of all limiters, started when the first is set."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Call[Any]]] = []
        self._cancelled: set[int] = set()
        self._changed = threading.Condition()
        self._running = False

    def set(self, call: Call[Any], seconds: float) -> None:
        """Expires the call in so many seconds, unless it is cleared."""
        when = time.monotonic() + seconds
        with self._changed:
            heapq.heappush(self._due, (when, call.number, call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="tidegate-timer", daemon=True).start()
            elif self._due[0][1] == call.number:
                self._changed.notify()

    def clear(self, call: Call[Any]) -> None:
        """Forgets the call. Its memory is free once half of the entries are such."""
        with self._changed:
            self._cancelled.add(call.number)
            if len(self._cancelled) * 2 > len(self._due):
                self._due = [entry for entry in self._due if entry[1] not in self._cancelled]
                heapq.heapify(self._due)
                self._cancelled.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, number, call = heapq.heappop(self._due)
                if number in self._cancelled:
                    self._cancelled.discard(number)
                    continue
            call.expire()
            del call
