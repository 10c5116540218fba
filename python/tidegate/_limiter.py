"""The limiter: slots owned by the work, a bounded queue owned by whoever waits."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Future
from functools import partial, wraps
from inspect import CO_COROUTINE, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from tidegate import _gateway, _sever, _statistics
from tidegate._call import NOBODY, Call, Held, log
from tidegate._core import Ledger, Refusal
from tidegate._drain import DrainReport, adrain, drain, dump
from tidegate._errors import Reentrant, refused
from tidegate._gateway import Gateway, patch
from tidegate._slot import SlotContext
from tidegate._stream import Stream
from tidegate._terms import Priority, Sever, Terms, check_count, check_seconds, label_of
from tidegate._waits import settled
from tidegate._workers import Timer, Workers

if TYPE_CHECKING:
    from tidegate._executor import LimitedExecutor

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_limiters: dict[int, weakref.ref[Limiter]] = {}
_timer = Timer()
_names = itertools.count(1)


class Ask:
    """The ways to make a call under a limiter, on the terms of `Limiter.ask`."""

    def __init__(self, limiter: Limiter | None, terms: Terms) -> None:
        self._limiter = cast("Limiter", self) if limiter is None else limiter
        self._terms = terms

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `fn` on a thread, under a slot, as `asyncio.to_thread` does without one. Under asyncio and trio.

        Cancelled, or out of `ask(timeout=...)`: a queued call is gone at once; a running one keeps its slot until
        its work has ended, which severing brings about within milliseconds where it can.

        Raises what `fn` raises, a `Rejected` if nothing of it has started, or `WaitTimeout`."""
        call = self.submit(fn, *args, **kwargs)
        timeout = self._terms.timeout
        try:
            if not await settled(call, timeout):
                raise call.timed_out(cast(float, timeout))
        except BaseException:
            call.leave()
            raise
        return call.answer()

    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `fn` under a slot and waits for it: in this thread, or, with `ask(timeout=...)`, on one that can be
        left. Raises as `run`."""
        timeout = self._terms.timeout
        if timeout is None:
            with self.slot(label_of(fn)):
                return fn(*args, **kwargs)
        call = self.submit(fn, *args, **kwargs)
        try:
            call.exception(timeout)
        except BaseException as error:
            if call.done():
                raise
            if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
                raise call.timed_out(timeout) from None
            call.leave()
            raise
        return call.result()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Queues `fn` and returns the future of its answer. Raises `Rejected` if it cannot be queued."""
        limiter, terms = self._limiter, self._terms
        if not callable(fn):
            raise TypeError(f"a function is needed, not {fn!r}")
        # As inspect.iscoroutinefunction says it for functions and methods, which takes as long as the rest.
        if (code := getattr(fn, "__code__", None)) is not None and code.co_flags & CO_COROUTINE:
            raise TypeError(f"{label_of(fn)} is a coroutine function: hold a slot around it, `async with slot()`")
        call: Call[T] = Call(limiter, terms, terms.label, partial(fn, *args, **kwargs))
        try:
            limiter.admit(call)
        except BaseException:
            call.leave()  # it may have its slot, if this was a signal
            raise
        return call

    def slot(self, label: str | None = None) -> SlotContext:
        """A slot for a block of code, which really ends when it is cancelled: `with` or `async with`. It is given
        back when the block is over."""
        terms = self._terms
        return SlotContext(self._limiter, terms, label or terms.label or "slot")

    @overload
    def stream(self, source: AsyncIterable[T], /) -> Stream[T]: ...
    @overload
    def stream(self, source: Iterable[T], /) -> Stream[T]: ...
    @overload
    def stream(
        self, source: Callable[P, Coroutine[Any, Any, AsyncIterable[T]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]: ...
    @overload
    def stream(self, source: Callable[P, AsyncIterable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
    @overload
    def stream(self, source: Callable[P, Iterable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
    def stream(self, source: Any, /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """An iterator that holds a slot from its first item to its end, not to the answer's head: of an iterable, or
        of what a function returns, which is then called under the slot. To be read with `for` or `async for`; with
        the latter a blocking iterator is read on a thread."""
        terms = self._terms
        return Stream(self, self._limiter, terms.label or label_of(source), source, args, kwargs)

    def wrap(self, fn: F, /) -> F:
        """A decorator: each call of the function is a call under the limiter. The signature stays: `def` is as `call`,
        `async def` runs in a slot, and generators of either kind hold one to their end."""
        made: Callable[..., Any]
        label = self._terms.label or label_of(fn)
        if isasyncgenfunction(fn) or isgeneratorfunction(fn):

            @wraps(fn)
            def generator(*args: Any, **kwargs: Any) -> Any:
                stream = self.stream(fn, *args, **kwargs)
                return stream.__aiter__() if isasyncgenfunction(fn) else stream.__iter__()

            made = generator
        elif iscoroutinefunction(fn):

            @wraps(fn)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self.slot(label):
                    return await fn(*args, **kwargs)

            made = coroutine
        else:

            @wraps(fn)
            def function(*args: Any, **kwargs: Any) -> Any:
                return self.call(fn, *args, **kwargs)

            made = function
        return cast(F, made)


class Limiter(Ask):
    """At most `limit` calls at once, really running ones: a slot belongs to the work, and comes back when the work has
    ended, not when whoever waited for it has given up. One for each provider, model or key; to be used from any
    thread and any event loop.

    limit: the most calls that somebody waits for. May be set while calls run.
    queue: the most that wait for a slot. A long queue turns a slow minute into a slow hour; the default is `limit`.
    hard_limit: the most that really run, abandoned ones included. The default is `limit`, so that nothing ever runs
        above it; more is an allowance for leftovers.
    queue_timeout: the longest that a call waits for its slot, in seconds.
    name: for errors, reports and metrics.
    sever: what ends the work of a call whose waiter has left: `"sockets"`, `"off"`, or a function of the call.
    on_leftover: told of each call whose work ended after its waiter had left, in the thread that did it.
    target_delay: once calls have stood in the queue for longer than this for a while, in seconds, the newest are served
        first and those that waited twice as long are sent away with `Overloaded`.
    flow_limit: the most slots of one flow, see `ask(flow=...)`.
    gateway: the base URL of a Tidegate gateway: requests to it carry the call's number, and it is told of calls that
        are left."""

    def __init__(
        self,
        limit: int,
        *,
        queue: int | None = None,
        hard_limit: int | None = None,
        queue_timeout: float | None = None,
        name: str = "",
        sever: Sever | Callable[[Call[Any]], None] = "sockets",
        on_leftover: Callable[[Call[Any]], None] | None = None,
        target_delay: float | None = None,
        flow_limit: int | None = None,
        gateway: str | None = None,
    ) -> None:
        self._limit = check_count("limit", limit, 1)
        self._queue = limit if queue is None else check_count("queue", queue, 0)
        self._hard_limit = limit if hard_limit is None else check_count("hard_limit", hard_limit, 1)
        if self._hard_limit < limit:
            raise ValueError(f"hard_limit {hard_limit} is below limit {limit}")
        self.queue_timeout = None if queue_timeout is None else check_seconds("queue_timeout", queue_timeout)
        self._target_delay = None if target_delay is None else check_seconds("target_delay", target_delay)
        self._flow_limit = None if flow_limit is None else check_count("flow_limit", flow_limit, 1)
        if on_leftover is not None and not callable(on_leftover):
            raise TypeError(f"on_leftover must be a function of a call, not {on_leftover!r}")
        self.gateway = None if gateway is None else Gateway(gateway)
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"name must be text, not {name!r}")
        self.name = name
        self.on_leftover = on_leftover
        super().__init__(None, Terms(sever=sever))
        self._begin()
        key = id(self)
        _limiters[key] = weakref.ref(self, lambda _: _limiters.pop(key, None))

    def _begin(self) -> None:
        """An empty ledger: at first, and in the child of a fork, where none of the parent's work is."""
        bounds = (self._limit, self._hard_limit, self._queue)
        self.epoch = os.getpid()
        self._ledger = Ledger(bounds, self.queue_timeout, self._target_delay, self._flow_limit)
        self._workers = Workers(f"tidegate-{self.name or next(_names)}")
        self.thread_free = self._workers.done
        """A thread has done its work. Said before its slot is given on, so that the next call finds it."""
        self._queued: dict[int, Call[Any]] = {}
        self._running: dict[int, Call[Any]] = {}
        self._idle: list[Future[None]] = []
        self._severed = itertools.count()
        self._severed_total = 0

    def ask(
        self,
        *,
        timeout: float | None = None,
        label: str | None = None,
        flow: Hashable = None,
        priority: Priority = "normal",
        weight: int = 1,
        sever: Sever | Callable[[Call[Any]], None] | None = None,
    ) -> Ask:
        """The same limiter on other terms.

        timeout: for queue and work together, in seconds.
        label: the call's name in reports; else the function's.
        flow: whose call it is; slots are shared out fairly between flows.
        priority: the higher is served first; the lower gets every tenth slot at least.
        weight: how many slots it takes.
        sever: as of the limiter."""
        return Ask(self, Terms(timeout, label, flow, priority, weight, self._terms.sever if sever is None else sever))

    def executor(self) -> LimitedExecutor:
        """A `ThreadPoolExecutor` whose threads and queue are this limiter's, for `loop.set_default_executor` and for
        libraries that take one."""
        from tidegate._executor import LimitedExecutor

        return LimitedExecutor(self)

    # --- what it knows ---

    @property
    def limit(self) -> int:
        """The most calls that somebody waits for. Setting it takes nothing from running calls, and starts queued ones
        if they have room now. The allowance for leftovers, `hard_limit - limit`, stays."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        limit = check_count("limit", limit, 1)
        hard_limit = limit + self._hard_limit - self._limit
        woken = self._ledger.resize(limit, hard_limit, self._queue)
        self._limit, self._hard_limit = limit, hard_limit
        self.wake(woken)

    @property
    def queue(self) -> int:
        """The most queued calls. May be set."""
        return self._queue

    @queue.setter
    def queue(self, queue: int) -> None:
        queue = check_count("queue", queue, 0)
        woken = self._ledger.resize(self._limit, self._hard_limit, queue)
        self._queue = queue
        self.wake(woken)

    @property
    def threads(self) -> int:
        """How many threads there are for its work now."""
        return self._workers.threads

    def statistics(self) -> _statistics.LimiterStatistics:
        """Every count at one instant."""
        return _statistics.of(self._ledger.snapshot(), tuple(self._running.copy().values()), self._severed_total)

    def dump(self) -> str:
        """What runs, and where: each call that holds a slot with its age and the stack of its thread."""
        return dump(self)

    # --- its end ---

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._ledger.snapshot()["closed"]

    def close(self) -> None:
        """Takes no more calls; the queued ones end with `Closed`, the running ones run on. May be called again."""
        self.wake(self._ledger.close())

    def drain(self, timeout: float) -> DrainReport:
        """Takes no more calls, lets queue and work end, for at most `timeout` seconds; then closes. Always returns by
        then, with what still runs."""
        return drain(self, timeout)

    async def adrain(self, timeout: float) -> DrainReport:
        """As `drain`, without blocking the event loop."""
        return await adrain(self, timeout)

    def seal(self) -> None:
        """Takes no more calls, serves the queue: the first half of `drain`."""
        self._ledger.seal()

    def idle(self) -> Future[None]:
        """A future that is done when nothing is queued and nothing runs."""
        future: Future[None] = Future()
        self._idle.append(future)
        self.look_idle()
        return future

    def __enter__(self) -> Limiter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Limiter {self.name!r} {self._limit}>" if self.name else f"<Limiter {self._limit}>"

    # --- for its calls ---

    def admit(self, call: Call[Any]) -> None:
        """Offers the call to the ledger, or puts it under the slot that its maker holds."""
        terms = call.terms
        if not _sever.installed and terms.sever == "sockets":
            _sever.install()
        if self.gateway is not None:
            patch()
        if call.outer is not None and (outer := self.holder(call.outer)) is not None:
            lent = outer.entry and outer.entry.lend(call.number)
            if lent is None:
                raise Reentrant(
                    f"the work of {outer.label!r} has a call of the same limiter under its slot already; a "
                    "second at once could wait for ever: make them one after the other, or outside of the work"
                )
            call.entry = lent
            self.wake(call.granted())
            return
        number = call.number
        offer = self._ledger.offer(number, terms.numbers, terms.timeout)
        if isinstance(offer, Refusal):
            raise refused(offer, self.name)
        call.entry, started = offer
        if started:
            self.wake(call.granted())
        else:
            self._queued[number] = call
            self.wake(call.look())  # again: nobody could tell it of its slot before it was among the queued
            if self.queue_timeout is not None and number in self._queued:
                _timer.set(call, self.queue_timeout)

    def holder(self, call: Call[Any] | None) -> Call[Any] | None:
        """The call of this limiter that `call` is, or is part of the work of."""
        while call is not None and not call.holds(self):
            call = call.outer
        return call

    def dispatch(self, call: Call[Any]) -> list[int]:
        """A call of the pool has its slot. Who got one by it, as it cannot use it."""
        workers = self._workers
        call.hiring = workers.add()
        self._running[call.number] = call
        if not call.hiring:
            workers.take(call)
            return NOBODY
        try:
            workers.hire(call)
        except (RuntimeError, MemoryError) as error:
            return call.fail(error)
        return NOBODY

    def hold(self, call: Call[Any]) -> None:
        """A call that needs no thread has its slot."""
        self._running[call.number] = call

    def passed_over(self, call: Call[Any]) -> None:
        """The call left when it had its slot and had not begun. Said by whoever finds it first."""
        counted = self._running.pop(call.number, None) is not None and not isinstance(call, Held)
        if call.hiring:  # its making was interrupted
            call.hiring = False
            counted = self._workers.failed()
        if counted:
            self._workers.done()

    def forget(self, call: Call[Any]) -> None:
        """The call is not queued any more."""
        if self._queued.pop(call.number, None) is not None and self.queue_timeout is not None:
            _timer.clear(call)

    def ended(self, call: Call[Any], woken: list[int]) -> None:
        """The work of a call is over, and its waiter is about to hear."""
        self._running.pop(call.number, None)
        if woken:
            self.wake(woken)

    def wake(self, woken: list[int]) -> None:
        """These calls have something to hear, and those to whom they pass it on."""
        for number in woken:
            if (call := self._queued.get(number)) is not None:
                try:
                    woken += call.look()
                except BaseException:  # out of what somebody else has it do when it is done
                    log.exception("a callback of %r failed", call)

    def severed(self) -> None:
        """A socket was shut down under an abandoned call."""
        self._severed_total = next(self._severed) + 1

    def look_idle(self) -> None:
        """A call has ended, and whoever waited for it has heard: it may have been the last."""
        while self._idle and self._ledger.is_idle():
            try:
                future = self._idle.pop()
            except IndexError:
                return  # another thread was faster
            if not future.done():
                future.set_result(None)


def limiters() -> list[Limiter]:
    """All that there are, for reports at exit, for tests and for metrics. Not of a WeakSet, which cannot be read while
    another thread makes one."""
    return [limiter for one in _limiters.copy().values() if (limiter := one()) is not None]


def _after_fork() -> None:
    global _timer
    _timer = Timer()
    _sever.forked()
    _gateway.forked()
    for limiter in limiters():
        limiter._begin()  # pyright: ignore[reportPrivateUsage]
        if limiter.gateway is not None:
            limiter.gateway.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
