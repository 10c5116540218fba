"""What can go wrong. Each error says whether work had started, which decides whether a retry can double it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tidegate._call import Call
    from tidegate._core import Refusal

if sys.version_info >= (3, 11):
    _Timeout = TimeoutError
else:

    class _Timeout(concurrent.futures.TimeoutError, asyncio.TimeoutError, TimeoutError):
        """All that a caller may have written `except` for before the three became one in Python 3.11."""


class LimiterError(Exception):
    """Anything that a limiter raises by itself."""


class Rejected(LimiterError):
    """The call got no slot. Nothing of it has started, so that a retry doubles nothing."""

    started: ClassVar[bool] = False

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds until it is worth asking again, from the measured rate: 1 to 60."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.retry_after)


class QueueFull(Rejected):
    """The queue holds as many calls as it may."""


class LeftoverFull(QueueFull):
    """The queue is full, and what it waits for is work that nobody waits for: abandoned calls hold the slots."""


class Overloaded(Rejected):
    """The queue stands, and the call had waited too long in it (`target_delay`)."""


class QueueTimeout(Rejected, _Timeout):
    """No slot came free in time, or none can."""


class Closed(Rejected):
    """The limiter takes no more calls, or was closed while the call was queued."""


class Reentrant(LimiterError):
    """The work of a call made two calls of the same limiter at once. One runs under the slot that the work has
    already; a second would have to wait for a slot that may never come free."""

    started: ClassVar[bool] = False


class WaitTimeout(LimiterError, _Timeout):
    """The time for the wait is over, and the work had started: it may have cost something, and may run on."""

    started: ClassVar[bool] = True

    def __init__(self, message: str, call: Call[Any]) -> None:
        super().__init__(message)
        self.call = call
        """The call, which nobody waits for now."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LimiterError, (self.args[0],)


class Abandoned(LimiterError):
    """The work was ended before its end, since nobody waited for it any more."""

    started: ClassVar[bool] = True


class Lost(LimiterError):
    """The call was made before a fork, and its work is in the parent process."""


class Severed(BaseException):
    """Raised inside work that nobody waits for any more, where it would connect, send or sleep anew: not an
    `Exception`, so that no retry swallows it. Callers of a limiter never see it."""


_REASONS: dict[str, type[Rejected]] = {
    "queue_full": QueueFull,
    "queue_bytes": QueueFull,
    "flow_full": QueueFull,
    "leftover_full": LeftoverFull,
    "deadline": QueueTimeout,
    "overload": Overloaded,
    "closed": Closed,
}


def refused(refusal: Refusal, name: str) -> Rejected:
    """The ledger's refusal as the exception for it."""
    where = f"limiter {name!r}: " if name else ""
    return _REASONS[refusal.reason](f"{where}{refusal.message}", refusal.retry_after)
