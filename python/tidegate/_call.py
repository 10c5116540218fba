"""A call: work that has, or waits for, a slot; and the future of its answer."""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate import _sever
from tidegate._core import Refusal
from tidegate._errors import Abandoned, Lost, QueueTimeout, Severed, WaitTimeout, refused
from tidegate._terms import label_of

if TYPE_CHECKING:
    from tidegate._core import Entry
    from tidegate._limiter import Limiter
    from tidegate._terms import Sever, Terms

T = TypeVar("T")

log = logging.getLogger("tidegate")
current: contextvars.ContextVar[Call[Any] | None] = contextvars.ContextVar("tidegate.call", default=None)
_numbers = itertools.count(1)

REQUESTS = 16
"""The most requests of one call that a gateway is told of: the last ones."""

_OK, _ERROR, _CANCELLED, _PANICKED = range(4)

NOBODY: list[int] = []
"""No call got a slot. Never added to."""


def current_call() -> Call[Any] | None:
    """The call whose work the caller is part of. Work that can stop by itself looks at its `left` now and then."""
    return current.get()


class Call(Future[T]):
    """A `concurrent.futures.Future`, whose slot belongs to the work.

    `cancel()` leaves: a queued call is gone at once, a running one is abandoned and what it waits for is severed.
    `result(timeout)` that runs out only steps away: the call counts as abandoned until somebody asks again."""

    started_at: float | None = None
    """When its work began, on the clock of `time.monotonic`; as the others."""
    abandoned_at: float | None = None
    ended_at: float | None = None
    thread: int | None = None
    """The identity of the thread that works for it."""
    entry: Entry | None = None
    """Its part in the ledger."""
    outer: Call[Any] | None = None
    """The call whose work made this one."""
    left: bool = False
    """Whether its waiter has gone for good."""

    requests: deque[tuple[str, dict[str, str]]]
    """What it has asked of the limiter's gateway, if it has one."""

    watched: bool = False
    """Whether somebody's callbacks are to be called when it is done."""
    hiring: bool = False
    """Whether a thread is counted for it that has not been started."""
    _context: contextvars.Context | None = None
    _ever = False  # whether a waiter has ever stepped away
    _gone: threading.Event | None = None  # set when it leaves; made by the first sleep

    def __init__(self, limiter: Limiter, terms: Terms, label: str | None, fn: Callable[[], T] | None) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.limiter = limiter
        self.terms = terms
        self.queued_at = time.monotonic()
        self._label = label
        self._named: Callable[[], T] | None = fn
        self._fn = fn
        self._epoch = limiter.epoch
        if fn is not None:
            self._context = contextvars.copy_context()
        if limiter.gateway is not None:
            self.requests = deque(maxlen=REQUESTS)
        if (outer := current.get()) is not None:
            self.outer = outer

    # --- what anybody may ask ---

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self._label or label_of(self._named)

    @property
    def sever(self) -> Sever | Callable[[Call[Any]], None]:
        """What ends its work when its waiter has left."""
        return self.terms.sever

    @property
    def started(self) -> bool:
        """Whether its work has begun, and may have cost something."""
        return self.started_at is not None

    @property
    def abandoned(self) -> bool:
        """Whether its work runs and nobody waits for it."""
        return self.entry is not None and self.entry.abandoned

    @property
    def age(self) -> float | None:
        """How long its work has been running, or ran, in seconds."""
        if self.started_at is None:
            return None
        return (self.ended_at or time.monotonic()) - self.started_at

    def cancel(self) -> bool:
        """Leaves. Whether that kept the work from starting; if not, it is told to end, and holds its slot until
        it has."""
        if self.done():
            return self.cancelled()
        self._check_epoch()
        return self.leave()

    def result(self, timeout: float | None = None) -> T:
        self._await_here(timeout)
        return super().result(timeout)

    def answer(self) -> T:
        """The result of a call that is done."""
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await_here(timeout)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self.watched = True
        super().add_done_callback(fn)

    def leave(self) -> bool:
        """The waiter has gone for good. Whether nothing of the call has started."""
        entry = self.entry
        if entry is None:
            return False
        self.left = True
        how, woken = entry.leave(False)
        self.limiter.wake(woken)
        if how == "left":
            self.limiter.forget(self)
            self.limiter.passed_over(self)
            self.ended_at = time.monotonic()
            if super().cancel():
                self.set_running_or_notify_cancel()
            self.limiter.look_idle()
            return True
        if how == "abandoned":
            self._abandoned()
            if (gone := self._gone) is not None:
                gone.set()
            _sever.begin(self)
        return False

    def sleep(self, seconds: float) -> None:
        """`time.sleep` for the work of a call, that ends when its waiter leaves: by `Severed`."""
        gone = self._gone
        if gone is None:
            gone = self._gone = threading.Event()  # before the look at `_left`, as `leave` does it the other way about
        if self.left or gone.wait(seconds):
            raise Severed("nobody waits for this call any more: it may not sleep on")

    def __repr__(self) -> str:
        state = "running, abandoned" if self.abandoned else self._state.lower()
        return f"<Call {self.number} {self.label!r} of {self.limiter!r}: {state}>"

    # --- for the limiter ---

    def look(self) -> list[int]:
        """Looks for the slot, and starts with it. Who got one by it, as it cannot use it."""
        entry = self.entry
        if entry is None:
            return NOBODY  # its offer is being made, and it will look for itself
        found = entry.start()
        if found is True:
            self.limiter.forget(self)
            return self.granted()
        if isinstance(found, Refusal):
            self.refuse(found)
        return NOBODY

    def granted(self) -> list[int]:
        """It has its slot. Who got one by it, as it cannot use it."""
        return self.limiter.dispatch(self)

    def refuse(self, refusal: Refusal) -> None:
        self.limiter.forget(self)
        self.ended_at = time.monotonic()
        self.settle(None, refused(refusal, self.limiter.name))
        self.limiter.look_idle()

    def expire(self) -> None:
        """Its time in the queue is up."""
        entry = self.entry
        if entry is None:
            return
        how, woken = entry.expire()
        self.limiter.wake(woken)
        if how == "left":
            self.limiter.forget(self)
            self.ended_at = time.monotonic()
            waited = self.ended_at - self.queued_at
            text = f"no slot came free within {waited:.3g} s, and the work has not started"
            self.settle(None, QueueTimeout(text))
            self.limiter.look_idle()
        elif how == "granted":
            self.limiter.forget(self)
            self.limiter.wake(self.granted())

    def begin(self) -> bool:
        """Its work begins in this thread. Whether it may."""
        if self.entry is None or not self.entry.begin():
            return False
        self.thread = threading.get_ident()
        self.started_at = time.monotonic()
        return self.set_running_or_notify_cancel()

    def work(self) -> None:
        """Does the work in this thread, which has nothing else to do, and gives the slot back."""
        value: T | None = None
        error: BaseException | None = None
        fn, context = self._fn, self._context
        assert fn is not None and context is not None
        self._fn = self._context = None
        if self._label is None:
            self._label = label_of(fn)
        self._named = None  # which holds the arguments
        try:
            context.run(current.set, self)
            value = context.run(fn)
        except Severed as severed:
            error = Abandoned(f"the work of {self.label!r} was ended, as nobody waited for it")
            error.__cause__ = severed
        except BaseException as raised:
            error = raised
        del fn, context
        self.end(value, error)

    def fail(self, error: BaseException) -> list[int]:
        """It has its slot and cannot begin. Who gets it."""
        if self.entry is None or self.done():
            return NOBODY
        self.ended_at = time.monotonic()
        woken = self.entry.finish(_ERROR)
        self.limiter.ended(self, NOBODY)
        self.settle(None, error)
        self.limiter.look_idle()
        return woken

    def end(self, value: T | None, error: BaseException | None) -> None:
        """The work is over: first the slot goes to the next, then the answer to the waiter."""
        entry = self.entry
        if entry is None or self._epoch != self.limiter.epoch:
            return  # a fork of the process that does the work
        if self.left and error is not None:
            outcome = _CANCELLED
        elif error is None:
            outcome = _OK
        else:
            outcome = _ERROR if isinstance(error, Exception) else _PANICKED
        self.ended_at = time.monotonic()
        self.thread = None
        self.outer = None
        limiter = self.limiter
        # The thread is free for the call that gets the slot, unless it has somebody's callbacks to run first: they may
        # take long, or wait for that very call.
        watched = self.watched or self.left
        if not watched:
            limiter.thread_free()
        try:
            limiter.ended(self, entry.finish(outcome))
            if error is None:
                self.set_result(value)  # type: ignore[arg-type]
            else:
                self.set_exception(error)
            if self.left:
                self._tell(error)
        finally:
            if watched:
                limiter.thread_free()
        limiter.look_idle()

    def settle(self, value: T | None, error: BaseException | None) -> None:
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)  # type: ignore[arg-type]

    def holds(self, limiter: Limiter) -> bool:
        """Whether it has a slot of `limiter`, and its work is not over."""
        return self.limiter is limiter and self.entry is not None and self.entry.begun

    def timed_out(self, timeout: float) -> TimeoutError:
        """Leaves, as the time for the wait is over, and says how far the call had come."""
        if self.leave():
            return QueueTimeout(f"the work had not started within {timeout:.3g} s, and will not")
        text = f"no answer within {timeout:.3g} s; the work of {self.label!r} had started"
        return WaitTimeout(text, self)

    # --- inside ---

    def _await_here(self, timeout: float | None) -> None:
        """Waits in this thread, and counts as a waiter meanwhile."""
        if self.done():
            return
        self._check_epoch()
        if self._ever and self.entry is not None and not self.left and self.entry.come_back():
            self.abandoned_at = None
        if timeout is None:
            return
        try:
            super().exception(timeout)
        except BaseException:
            if not self.done():
                self._step_away()
            raise

    def _step_away(self) -> None:
        if self.entry is not None and self.entry.begun and not self.left:
            self._ever = True
            how, woken = self.entry.leave(True)
            self.limiter.wake(woken)
            if how == "abandoned":
                self._abandoned()

    def _abandoned(self) -> None:
        if self.abandoned_at is None:
            self.abandoned_at = time.monotonic()

    def _check_epoch(self) -> None:
        if self._epoch != self.limiter.epoch:
            raise Lost("this call was made before a fork: its work is in the parent process")

    def _tell(self, error: BaseException | None) -> None:
        """What became of work that nobody waits for: else its error would vanish."""
        since = time.monotonic() - (self.abandoned_at or time.monotonic())
        if error is None:
            log.info("abandoned call %r ended %.3f s after its waiter had left", self.label, since)
        else:
            log.info("abandoned call %r ended %.3f s after its waiter had left: %r", self.label, since, error)
        if (hook := self.limiter.on_leftover) is not None:
            try:
                hook(self)
            except Exception:
                log.exception("on_leftover of %r failed", self.limiter)


class Held(Call[None]):
    """A call whose work is a block of the caller's own code."""

    def __init__(self, limiter: Limiter, terms: Terms, label: str) -> None:
        super().__init__(limiter, terms, label, None)
        self.ready: Future[None] = Future()
        """Done when it has its slot, or never will."""
        self._token: contextvars.Token[Call[Any] | None] | None = None

    def granted(self) -> list[int]:
        self.limiter.hold(self)
        self.ready.set_result(None)
        return NOBODY

    def settle(self, value: None, error: BaseException | None) -> None:
        super().settle(value, error)
        if not self.ready.done():
            if error is not None:
                self.ready.set_exception(error)
            else:
                self.ready.set_result(None)

    def leave(self) -> bool:
        left = super().leave()
        if left and not self.ready.done():
            self.ready.cancel()
        return left

    def enter(self) -> None:
        """The block begins: what it calls is inside the call."""
        self.ready.result()
        if not self.begin():
            raise QueueTimeout("the call had left its queue")
        self._token = current.set(self)

    def exit(self, error: BaseException | None) -> None:
        """The block is over."""
        if self._token is not None:
            try:
                current.reset(self._token)
            except (ValueError, RuntimeError):
                pass  # in another context, as the loop closes a generator that was not read to its end; or twice
            self._token = None
        if self.done():
            return
        outcome = None if error is None or isinstance(error, GeneratorExit) else error
        self.end_block(outcome)

    def end_block(self, error: BaseException | None) -> None:
        """Ends with the error for the count, and none for a reader of the future: the block has raised it itself."""
        entry = self.entry
        if entry is None or self._epoch != self.limiter.epoch:
            return
        self.ended_at = time.monotonic()
        self.thread = None
        self.outer = None
        if error is None:
            outcome = _OK
        elif isinstance(error, Exception):
            outcome = _ERROR
        else:
            outcome = _CANCELLED
        self.limiter.ended(self, entry.finish(outcome))
        self.settle(None, None)
        self.limiter.look_idle()
