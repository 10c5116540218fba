"""Synchronous calls to models that can be limited, abandoned, counted and really ended.

    limiter = tidegate.Limiter(8, queue=8)
    answer = await limiter.run(client.chat.completions.create, model="m", messages=messages)

A call is work; a waiter is somebody interested in it. They end at different times. Here the slot belongs to the work:
a timeout ends the wait, and the slot comes back when the thread has really ended, which severing its sockets brings
about within milliseconds. What cannot be ended is counted, named and bounded."""

from __future__ import annotations

import atexit as _atexit


def _check_interpreter() -> None:
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            interpreters = __import__(name)
            current = interpreters.get_current()
        except (ImportError, AttributeError):
            continue
        number = int(current[0] if isinstance(current, tuple) else current)  # pyright: ignore
        if number != 0:
            raise ImportError(
                "tidegate does not work in a subinterpreter: its threads are daemons, which are not allowed there, and "
                "its limits would not be the process's. Import it in the main interpreter and make the calls there"
            )
        return


_check_interpreter()

from tidegate._call import Call, current_call  # noqa: E402
from tidegate._drain import DrainReport, Leftover, at_exit  # noqa: E402
from tidegate._errors import (  # noqa: E402
    Abandoned,
    Closed,
    LeftoverFull,
    LimiterError,
    Lost,
    Overloaded,
    QueueFull,
    QueueTimeout,
    Reentrant,
    Rejected,
    Severed,
    WaitTimeout,
)
from tidegate._executor import LimitedExecutor  # noqa: E402
from tidegate._limiter import Ask, Limiter  # noqa: E402
from tidegate._statistics import LimiterStatistics  # noqa: E402
from tidegate._stream import Stream  # noqa: E402

_atexit.register(at_exit)

__all__ = [
    "Abandoned",
    "Ask",
    "Call",
    "Closed",
    "DrainReport",
    "Leftover",
    "LeftoverFull",
    "LimitedExecutor",
    "Limiter",
    "LimiterError",
    "LimiterStatistics",
    "Lost",
    "Overloaded",
    "QueueFull",
    "QueueTimeout",
    "Reentrant",
    "Rejected",
    "Severed",
    "Stream",
    "WaitTimeout",
    "current_call",
]
