"""An iterator that holds a slot to its end."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction, unwrap
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidegate._call import current_call
from tidegate._waits import checkpoint, settled, when_done

if TYPE_CHECKING:
    from types import TracebackType

    from tidegate._call import Call
    from tidegate._limiter import Ask, Limiter

T = TypeVar("T")

AHEAD = 16
"""How many items a thread reads ahead of an asynchronous reader."""


class Stream(Generic[T]):
    """`for item in stream` or `async for item in stream`, once. `with` and `async with` close it in any case."""

    def __init__(
        self, ask: Ask, limiter: Limiter, label: str, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._ask = ask
        self._limiter = limiter
        self._label = label
        self._source = source
        self._args = args
        self._kwargs = kwargs
        self._reader: Generator[T] | AsyncGenerator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        # Not kept here: a reader that nobody holds any more is closed at once.
        return self._read()

    def __aiter__(self) -> AsyncIterator[T]:
        return self._aread() if self._is_asynchronous() else self._pumped()

    def __enter__(self) -> Iterator[T]:
        reader = self._reader = self._read()
        return reader

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(self._reader, Generator):
            self._reader.close()

    async def __aenter__(self) -> AsyncIterator[T]:
        reader = self._reader = self._aread() if self._is_asynchronous() else self._pumped()
        return reader

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(self._reader, AsyncGenerator):
            await self._reader.aclose()

    # --- in the reader's own thread or task ---

    def _read(self) -> Generator[T]:
        if self._is_asynchronous():
            raise TypeError(f"{self._label} is asynchronous: read it with `async for`")
        with self._ask.slot(self._label):
            items = self._open()
            try:
                yield from items
            finally:
                _close(items)

    async def _aread(self) -> AsyncGenerator[T]:
        async with self._ask.slot(self._label):
            source: Any = self._source
            if not _has(source, "__aiter__"):
                source = source(*self._args, **self._kwargs)
            if isawaitable(source):
                source = await source
            try:
                async for item in source:
                    yield item
            finally:
                if (close := getattr(source, "aclose", None) or getattr(source, "close", None)) is not None:
                    closing = close()
                    if isawaitable(closing):
                        await closing

    # --- on a thread, for an asynchronous reader ---

    def _pumped(self) -> AsyncGenerator[T]:
        channel = _Channel[T]()
        reader = self._pump_into(channel)
        # Python closes such a generator in its event loop. Where that is closed already, nobody would.
        weakref.finalize(reader, channel.close).atexit = False
        return reader

    async def _pump_into(self, channel: _Channel[T]) -> AsyncGenerator[T]:
        call = channel.call = self._ask.submit(self._pump, channel)
        when_done(call, channel.over)
        try:
            while await channel.has_more(call):
                yield channel.next()
            call.result()
        finally:
            channel.close()

    def _pump(self, channel: _Channel[T]) -> None:
        items = self._open()
        call = current_call()
        try:
            for item in items:
                if not channel.put(item) or (call is not None and call.left):
                    break
        finally:
            _close(items)

    def _open(self) -> Iterator[T]:
        source: Any = self._source
        if not _has(source, "__iter__"):
            source = source(*self._args, **self._kwargs)
        if hasattr(source, "__aiter__") or isawaitable(source):
            text = "is asynchronous: give stream() the coroutine function itself, or its result"
            raise TypeError(f"{self._label} {text}")
        # The object itself where it is its own iterator, as it is the one that can be closed.
        items: Iterator[T] = source if hasattr(source, "__next__") else iter(source)
        return items

    def _is_asynchronous(self) -> bool:
        source: Any = self._source
        if _has(source, "__aiter__"):
            return True
        inner = unwrap(source) if callable(source) else source
        return iscoroutinefunction(inner) or isasyncgenfunction(inner)


class _Channel(Generic[T]):
    """From a thread to a task, with room for a few items."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._room = threading.Semaphore(AHEAD)
        self._closed = False
        self._lock = threading.RLock()  # as the collector of garbage can make a call leave in any line
        self.call: Call[None] | None = None
        self._awaited: Future[None] | None = None

    def put(self, item: T) -> bool:
        """Waits for room. Whether anybody still reads."""
        self._room.acquire()
        if self._closed:
            return False
        with self._lock:
            self._items.append(item)
            awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.set_result(None)
        return True

    async def has_more(self, call: Call[None]) -> bool:
        """Waits for an item or the end; a checkpoint in any case, as a quick thread would else keep the loop busy."""
        await checkpoint()
        while True:
            with self._lock:
                if self._items:
                    return True
                if call.done():
                    return False
                awaited = self._awaited = Future()
            await settled(awaited)

    def next(self) -> T:
        with self._lock:
            item = self._items.popleft()
        self._room.release()
        return item

    def over(self, _: object) -> None:
        """Nothing more will come."""
        with self._lock:
            awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.set_result(None)

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        self._room.release()
        if self.call is not None and not self.call.done():
            self.call.leave()


def _has(source: object, method: str) -> bool:
    """Whether it is read itself, and not what it returns, as with a function or a class."""
    return hasattr(source, method) and not isinstance(source, type)


def _close(items: object) -> None:
    """Closes a generator, or the response behind an SDK's stream."""
    for name in ("close", "aclose"):
        close = getattr(items, name, None)
        if callable(close):
            close()
            return
