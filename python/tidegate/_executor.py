"""The limiter as a thread pool, for whatever takes one."""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tidegate._errors import QueueFull
from tidegate._waits import when_done

if TYPE_CHECKING:
    from tidegate._call import Call
    from tidegate._limiter import Ask, Limiter

P = ParamSpec("P")
T = TypeVar("T")

LOOK_AGAIN = 0.02
"""How often a shutdown looks whether somebody still waits, in seconds."""


class LimitedExecutor(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` without threads of its own. Its futures are `Call`s: one that is cancelled leaves the
    queue at once, and one that is cancelled while it runs is abandoned, as `asyncio` does when a waiter leaves.

    Its queue is the limiter's and bounded: `submit` raises `QueueFull`. `map` submits no more than there is room for.
    `shutdown` waits for the calls that somebody waits for, and leaves the others."""

    def __init__(self, limiter: Limiter, ask: Ask | None = None) -> None:
        super().__init__(max_workers=limiter.limit, thread_name_prefix="tidegate")
        self._limiter = limiter
        self._ask = limiter if ask is None else ask
        self._calls: dict[int, Call[Any]] = {}
        self._over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        if self._over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        call = self._ask.submit(fn, *args, **kwargs)
        self._calls[call.number] = call
        when_done(call, self._forget)
        return call

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        end = None if timeout is None else time.monotonic() + timeout
        arguments = zip(*iterables, strict=False)
        calls: deque[Call[T]] = deque()
        waiting: deque[tuple[Any, ...]] = deque()

        def fill() -> None:
            while buffersize is None or len(calls) < buffersize:
                one = waiting.popleft() if waiting else next(arguments, None)
                if one is None:
                    return
                try:
                    calls.append(self.submit(fn, *one))
                except QueueFull:
                    if not calls:
                        raise
                    waiting.append(one)
                    return

        def results() -> Iterator[T]:
            try:
                while calls:
                    call = calls.popleft()
                    try:
                        answer = call.result(None if end is None else end - time.monotonic())
                    finally:
                        call.cancel()
                    fill()
                    yield answer
            finally:
                for call in calls:
                    call.cancel()

        fill()
        return results()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._over = True
        if cancel_futures:
            for call in self._calls.copy().values():
                if not call.started:
                    call.cancel()
        while wait and (attended := [call for call in self._calls.copy().values() if not call.left]):
            concurrent.futures.wait(attended, timeout=LOOK_AGAIN)
        super().shutdown(wait=False)

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        self._calls.pop(future.number, None)  # type: ignore[attr-defined]  # pyright: ignore
