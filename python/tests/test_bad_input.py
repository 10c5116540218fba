"""What is asked for wrongly, at the wrong time or in the wrong place: a clear exception each, and no deadlock."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server import until
from work import balanced, blocking, idle, raising

import tidegate


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"limit": 0}, ValueError, "limit must be at least 1, not 0: a limit of 0 would never start anything"),
        ({"limit": -3}, ValueError, "limit must be at least 1"),
        ({"limit": "8"}, TypeError, "limit must be a whole number of calls, not '8'"),
        ({"limit": 2.5}, TypeError, "limit must be a whole number"),
        ({"limit": True}, TypeError, "limit must be a whole number"),
        ({"limit": None}, TypeError, "limit must be a whole number"),
        ({"limit": 1 << 40}, ValueError, "limit must be at most 16777216"),
        ({"limit": 1, "queue": -1}, ValueError, "queue must be at least 0"),
        ({"limit": 1, "queue": "many"}, TypeError, "queue must be a whole number"),
        ({"limit": 4, "hard_limit": 3}, ValueError, "hard_limit 3 is below limit 4"),
        ({"limit": 1, "queue_timeout": "5s"}, TypeError, "queue_timeout must be a number of seconds"),
        ({"limit": 1, "queue_timeout": -1}, ValueError, "queue_timeout must be between 0"),
        ({"limit": 1, "queue_timeout": float("nan")}, ValueError, "queue_timeout must be between 0"),
        ({"limit": 1, "target_delay": "x"}, TypeError, "target_delay must be a number"),
        ({"limit": 1, "flow_limit": 0}, ValueError, "flow_limit must be at least 1"),
        ({"limit": 1, "sever": "threads"}, ValueError, "sever must be 'sockets', 'off' or a function"),
        ({"limit": 1, "on_leftover": 5}, TypeError, "on_leftover must be a function"),
        ({"limit": 1, "name": 5}, TypeError, "name must be text, not 5"),
        ({"limit": 1, "queue_timeout": float("inf")}, ValueError, "queue_timeout must be between 0"),
    ],
)
def test_settings(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tidegate.Limiter(**arguments)


@pytest.mark.parametrize(
    ("terms", "error", "text"),
    [
        ({"timeout": "1"}, TypeError, "timeout must be a number of seconds"),
        ({"timeout": -1}, ValueError, "timeout must be between 0"),
        ({"timeout": float("nan")}, ValueError, "timeout must be between 0"),
        ({"label": b"x"}, TypeError, "label must be text, not b'x'"),
        ({"weight": 0}, ValueError, "weight must be at least 1"),
        ({"priority": "urgent"}, ValueError, "priority must be 'high', 'normal' or 'low'"),
        ({"sever": "x"}, ValueError, "sever must be"),
        ({"flow": []}, TypeError, "unhashable"),
    ],
)
def test_terms(terms: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tidegate.Limiter(1).ask(**terms)


def test_a_bad_limit_leaves_the_old_one() -> None:
    limiter = tidegate.Limiter(3)
    for bad in (0, "7", None):
        with pytest.raises((TypeError, ValueError)):
            limiter.limit = bad  # type: ignore[assignment]
    assert limiter.limit == 3 and limiter.statistics().total_tokens == 3


def test_what_is_no_blocking_function() -> None:
    limiter = tidegate.Limiter(1)

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="is a coroutine function: hold a slot around it"):
        limiter.submit(coroutine)
    with pytest.raises(TypeError, match="a function is needed, not 5"):
        limiter.submit(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is asynchronous: read it with `async for`"):
        list(limiter.stream(coroutine))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        limiter.submit(lambda: 1, no=2).result(5)  # type: ignore[call-arg]
    idle(limiter)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), StopIteration(1)]
)
def test_work_that_raises_what_is_no_exception(error: BaseException) -> None:
    limiter = tidegate.Limiter(1)
    for _ in range(3):
        call = limiter.submit(raising(error))
        assert call.exception(5) is error
    assert limiter.threads == 1  # none of them ended the thread
    with pytest.raises(type(error)):
        limiter.call(raising(error))
    idle(limiter)
    outcomes = limiter.statistics().finished_by_outcome
    assert outcomes["panicked" if not isinstance(error, Exception) else "error"][0] >= 3


def test_calls_from_inside_the_work_run_under_its_slot() -> None:
    """A limit of one, no queue: a second slot would never come."""
    limiter = tidegate.Limiter(1, queue=0)

    def inner(value: int) -> int:
        assert limiter.statistics().borrowed_tokens == 1
        return value

    def outer() -> list[int]:
        answers = [limiter.call(inner, 1), limiter.submit(inner, 2).result(5), limiter.ask(timeout=5).call(inner, 3)]
        with limiter.slot():
            answers.append(inner(4))
        answers.append(asyncio.run(limiter.run(inner, 5)))
        answers.append(limiter.submit(lambda: limiter.submit(inner, 6).result(5)).result(5))
        return answers

    assert limiter.submit(outer).result(10) == [1, 2, 3, 4, 5, 6]
    assert limiter.call(outer) == [1, 2, 3, 4, 5, 6]
    assert limiter.statistics().started == 2
    idle(limiter)


def test_two_calls_at_once_from_inside_the_work_are_refused() -> None:
    limiter = tidegate.Limiter(1, queue=5)
    with blocking() as work:

        def outer() -> None:
            first = limiter.submit(work)
            with pytest.raises(tidegate.Reentrant, match="make them one after the other"):
                limiter.submit(work)
            work.release.set()
            first.result(5)
            limiter.submit(int).result(5)

        limiter.submit(outer).result(10)
    idle(limiter)


def test_a_call_from_inside_that_outlives_the_work_keeps_its_slot() -> None:
    limiter = tidegate.Limiter(1, queue=1)
    with blocking() as work:
        inner: list[tidegate.Call[Any]] = []
        limiter.submit(lambda: inner.append(limiter.submit(work))).result(5)
        queued = limiter.submit(int)
        until(lambda: work.active)
        assert not queued.done() and limiter.statistics().running == 1
        work.release.set()
        assert queued.result(5) == 0
    idle(limiter)


def test_a_task_made_in_a_slot_that_is_over_asks_for_its_own() -> None:
    limiter = tidegate.Limiter(1, queue=0)

    async def main() -> None:
        over = asyncio.Event()

        async def later() -> int:
            await over.wait()
            return await limiter.run(lambda: 7)

        async with limiter.slot():
            task = asyncio.ensure_future(later())
        over.set()
        assert await task == 7

    asyncio.run(main())
    assert limiter.statistics().started == 2


def test_use_after_close() -> None:
    limiter = tidegate.Limiter(1)
    limiter.close()
    for use in (
        lambda: limiter.submit(int),
        lambda: limiter.call(int),
        lambda: limiter.slot().__enter__(),
        lambda: list(limiter.stream([1])),
        lambda: asyncio.run(limiter.run(int)),
        lambda: limiter.executor().submit(int),
        lambda: limiter.wrap(int)(),
    ):
        with pytest.raises(tidegate.Closed, match="the limiter is closed") as caught:
            use()
        assert not caught.value.started
    assert limiter.drain(0).clean and limiter.statistics().rejected_by_reason["closed"] == 7
    limiter.limit = 5
    balanced(limiter)


def test_a_slot_is_held_once() -> None:
    limiter = tidegate.Limiter(2)
    slot = limiter.slot()
    with slot:
        with pytest.raises(RuntimeError, match="is held already"):
            slot.__enter__()
    with slot:
        pass
    idle(limiter)


def test_an_event_loop_that_ends_before_the_work() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:

        async def main() -> None:
            asyncio.ensure_future(limiter.run(work))
            while not work.active:
                await asyncio.sleep(0.001)

        asyncio.run(main())
        assert limiter.statistics().abandoned == 1
    idle(limiter)


def test_a_coroutine_that_is_collected_unfinished_leaves() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:
        loop = asyncio.new_event_loop()
        coroutine = limiter.run(work)
        loop.call_soon(lambda: None)

        async def step() -> None:
            coroutine.send(None)

        loop.run_until_complete(step())
        until(lambda: work.active)
        coroutine.close()
        loop.close()
        assert limiter.statistics().abandoned == 1
    idle(limiter)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_callbacks_that_raise_end_no_thread_and_no_wait(kind: type[BaseException]) -> None:
    """Of one that is done, of one that is turned down by the end of another, and of one that is left."""

    def fails(_: object) -> None:
        raise kind(3)

    limiter = tidegate.Limiter(1, queue=50, target_delay=0.001, on_leftover=fails)
    for _ in range(3):
        with blocking() as work:
            running = limiter.submit(work, 5)
            queued = [limiter.submit(threading.Event().wait, 0.005) for _ in range(40)]
            for call in [running, *queued]:
                call.add_done_callback(fails)
            until(lambda: (limiter.statistics().oldest_queued or 0) > 0.02)
            work.release.set()
            assert running.result(30) == 5
            for call in queued:
                call.exception(30)
        with blocking() as work:
            left = limiter.submit(work)
            until(lambda: work.active)
            left.cancel()
            work.release.set()
            until(left.done)
    assert limiter.submit(pow, 2, 3).result(30) == 8
    assert limiter.drain(30).clean
    balanced(limiter)


@pytest.mark.parametrize("limit", [1, 8])
def test_callbacks_that_wait_for_other_calls(limit: int) -> None:
    """In the thread of the call that is done, on one that was queued behind it and on one that is made now."""
    limiter = tidegate.Limiter(limit, queue=5)
    answers: list[int] = []
    with blocking() as work:
        first = limiter.submit(work)
        rest = [limiter.submit(work, 3) for _ in range(limit)]

        def waits(_: object) -> None:
            answers.append(rest[-1].result(20))
            answers.append(limiter.submit(pow, 2, 3).result(20))

        first.add_done_callback(waits)
        until(lambda: work.active == limit)
        work.release.set()
        until(lambda: len(answers) == 2)
    assert answers == [3, 8]
    told: list[int] = []
    leaves = tidegate.Limiter(limit, on_leftover=lambda _: told.append(leaves.submit(pow, 2, 4).result(20)))
    with blocking() as work:
        left = leaves.submit(work)
        until(lambda: work.active)
        left.cancel()
    until(lambda: told == [16])
    idle(limiter), idle(leaves)


def endless() -> Iterator[int]:
    return itertools.count()


async def aendless() -> AsyncIterator[int]:
    for number in itertools.count():
        yield number


@pytest.mark.parametrize("source", [endless, aendless])
def test_a_stream_whose_event_loop_is_closed_before_it_gives_its_slot_back(source: Any) -> None:
    limiter = tidegate.Limiter(1)
    loop = asyncio.new_event_loop()
    readers = [limiter.stream(source).__aiter__()]

    async def first() -> int:
        return await anext(readers[0])

    assert loop.run_until_complete(first()) == 0
    assert limiter.statistics().running == 1
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python, that the generator could not be closed
        readers.clear()
        gc.collect()
    idle(limiter)


@pytest.mark.parametrize("source", [endless, aendless])
def test_a_stream_that_nobody_reads_to_its_end_gives_its_slot_back(source: Any) -> None:
    limiter = tidegate.Limiter(1)

    async def main() -> None:
        async for number in limiter.stream(source):
            if number == 3:
                break
        gc.collect()
        while limiter.statistics().running:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    idle(limiter)


@pytest.fixture
def frozen() -> Iterator[None]:
    """What is there already is left out of the collection of garbage, which takes long with all these libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


def _one(limiter: tidegate.Limiter) -> None:
    with limiter.slot():
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda limiter: limiter.call(int),
        lambda limiter: limiter.ask(timeout=5).call(int),
        lambda limiter: limiter.submit(int).result(5),
        lambda limiter: limiter.submit(int).cancel(),
        lambda limiter: list(limiter.stream([1])),
        _one,
        lambda limiter: asyncio.run(limiter.run(int)),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it hits a `__del__`
def test_interrupted_at_every_line(use: Callable[[tidegate.Limiter], Any], frozen: None) -> None:
    """As by Ctrl-C: no slot and no thread is lost, whichever line of the package it hits."""
    folder = str(Path(tidegate.__file__).parent)
    line = left = 0
    places: list[str] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    while True:
        line += 1
        left = line
        limiter = tidegate.Limiter(1)
        sys.settrace(trace)
        try:
            use(limiter)
        except BaseException as error:
            del error  # with its frames
        finally:
            sys.settrace(None)
        if left > 0:
            break
        place = places[-1]
        gc.collect()
        end = time.monotonic() + 5
        while limiter.statistics().borrowed_tokens and time.monotonic() < end:
            time.sleep(0.0005)
        assert not limiter.statistics().borrowed_tokens, place
        assert limiter.submit(pow, 2, 3).result(5) == 8, place
        balanced(limiter)
    assert line > 20


def test_a_system_that_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, each call is told; with one, that works off all."""

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    limiter = tidegate.Limiter(1, queue=5000)
    elsewhere = contextvars.copy_context()
    with limiter.slot():
        calls = [elsewhere.run(limiter.submit, int) for _ in range(5000)]
        monkeypatch.setattr(threading.Thread, "start", none)
    for call in calls:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call.result(5)
        assert not call.started
    idle(limiter)
    monkeypatch.undo()
    limiter.queue, limiter.limit = 50, 2
    with blocking() as work:
        running = limiter.submit(work, 7)
        until(lambda: work.active)
        monkeypatch.setattr(threading.Thread, "start", none)
        others = [limiter.submit(pow, 2, i) for i in range(50)]
        assert limiter.statistics().running == 2 and not any(call.started for call in others)
        work.release.set()
        assert running.result(5) == 7 and [call.result(5) for call in others] == [2**i for i in range(50)]
    assert limiter.threads == 1
    monkeypatch.undo()
    idle(limiter)


def test_limiters_come_and_go_while_they_are_looked_at() -> None:
    over = threading.Event()

    def make() -> None:
        while not over.is_set():
            for _ in range(100):
                tidegate.Limiter(1)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            assert all(limiter.limit for limiter in tidegate._limiter.limiters())
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_an_idle_thread_keeps_nothing_alive() -> None:
    limiter = tidegate.Limiter(1)

    class Answer:
        pass

    for _ in range(2):  # the call that the thread was made for, and one that it took
        answer = weakref.ref(limiter.submit(Answer).result(5))
        until(lambda: gc.collect() is not None and answer() is None)  # noqa: B023
    assert limiter.threads == 1
    gone = weakref.ref(limiter)
    del limiter
    until(lambda: gc.collect() is not None and gone() is None)


def test_threads_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = tidegate.Limiter(1)

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        call = limiter.submit(int)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call.result(5)
    assert limiter.submit(int).result(5) == 0
    idle(limiter)
