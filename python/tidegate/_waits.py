"""Waits for a call's end under asyncio and trio, in which the waiter may be cancelled and the call is not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio


def when_done(future: Future[Any], fn: Callable[[Future[Any]], object]) -> None:
    """As `add_done_callback`, for what is over at once: a call is not watched by it."""
    Future.add_done_callback(future, fn)  # pyright: ignore[reportUnknownMemberType]


def in_trio() -> bool:
    """Whether this is a task of trio, by itself or through anyio."""
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_task()


async def checkpoint() -> None:
    """Lets others run, and a cancellation in."""
    if in_trio():
        import trio

        await trio.lowlevel.checkpoint()
    else:
        await asyncio.sleep(0)


def settled(future: Future[Any], timeout: float | None = None) -> Coroutine[Any, Any, bool]:
    """Waits until `future` is done, at most `timeout` seconds; whether it is.

    Cancelling the wait raises as the event loop does it, and does nothing to the future."""
    return _settled_in_trio(future, timeout) if in_trio() else _settled_in_asyncio(future, timeout)


async def _settled_in_asyncio(future: Future[Any], timeout: float | None) -> bool:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] | None = loop.create_future()

    def wake() -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def ended(_: Future[Any]) -> None:
        if waiter is None:
            return
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            pass  # the loop is closed, and nobody waits in it

    timer = None if timeout is None else loop.call_later(timeout, wake)
    when_done(future, ended)
    try:
        assert waiter is not None
        await waiter
    finally:
        waiter = None
        if timer is not None:
            timer.cancel()
    return timeout is None or future.done()


async def _settled_in_trio(future: Future[Any], timeout: float | None) -> bool:
    import trio

    task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()

    def wake() -> None:
        nonlocal task
        if task is not None:
            sleeper, task = task, None
            trio.lowlevel.reschedule(sleeper)

    def ended(_: Future[Any]) -> None:
        if task is None:
            return
        try:
            token.run_sync_soon(wake)
        except trio.RunFinishedError:
            pass  # nobody waits there

    def abort(_: Any) -> trio.lowlevel.Abort:
        nonlocal task
        task = None
        return trio.lowlevel.Abort.SUCCEEDED

    when_done(future, ended)
    with trio.move_on_after(float("inf") if timeout is None else timeout):
        await trio.lowlevel.wait_task_rescheduled(abort)
    return future.done()
