"""The ways to make a call, under asyncio, trio and threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
import trio
from server import until
from work import Work, balanced, blocking, idle, raising

import tidegate

BACKENDS = ["asyncio", "trio"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_returns_and_raises_what_the_function_does(backend: str) -> None:
    limiter = tidegate.Limiter(2)

    async def main() -> None:
        assert await limiter.run(divmod, 7, 2) == (3, 1)
        assert await limiter.run(int, "11", base=2) == 3
        with pytest.raises(KeyError, match="gone"):
            await limiter.run(raising(KeyError("gone")))

    anyio.run(main, backend=backend)
    now = limiter.statistics()
    assert (now.started, now.finished, now.finished_by_outcome["ok"], now.finished_by_outcome["error"]) == (
        3,
        3,
        (2, 0),
        (1, 0),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_waiter_leaves_at_once_and_the_slot_stays_with_the_work(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=1)
    with blocking() as work:

        async def main() -> None:
            for patience in (1, 0.02, 0.02):  # the first has to begin in it
                with anyio.move_on_after(patience) as scope:
                    await limiter.run(work)
                assert scope.cancelled_caught
            now = limiter.statistics()
            assert (now.abandoned, now.attended, now.tasks_waiting) == (1, 0, 0)
            assert (work.started, work.active) == (1, 1)
            with anyio.fail_after(30):
                await until_async(lambda: limiter.statistics().cancelled_before_start == 2)

        anyio.run(main, backend=backend)
        assert work.started == 1
    idle(limiter)
    assert limiter.statistics().finished_abandoned == 1


async def until_async(condition) -> None:
    while not condition():
        await anyio.sleep(0.001)


def test_in_trio_itself() -> None:
    limiter = tidegate.Limiter(1)

    async def main() -> int:
        return await limiter.run(lambda: 5)

    assert trio.run(main) == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_queue_gives_its_slots_in_order(backend: str) -> None:
    limiter = tidegate.Limiter(2, queue=30)
    order: list[int] = []

    async def main() -> None:
        async def one(number: int) -> None:
            await limiter.run(order.append, number)

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(one, number)

    anyio.run(main, backend=backend)
    assert sorted(order) == list(range(30))
    assert limiter.threads <= 2
    balanced(limiter)


def test_call_in_this_thread_and_on_another() -> None:
    limiter = tidegate.Limiter(1)
    assert limiter.call(threading.get_ident) == threading.get_ident()
    assert limiter.ask(timeout=5).call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        limiter.call(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        limiter.ask(timeout=5).call(lambda: 1 // 0)
    idle(limiter)


def test_a_timeout_says_whether_the_work_had_started() -> None:
    limiter = tidegate.Limiter(1, queue=5)
    with blocking() as work:
        with pytest.raises(tidegate.WaitTimeout) as caught:
            limiter.ask(timeout=1).call(work)
        assert caught.value.started and isinstance(caught.value, TimeoutError)
        assert caught.value.call.abandoned and caught.value.call.label == "Work"
        for ask in (limiter.ask(timeout=0.02), limiter.ask(timeout=0.0)):
            with pytest.raises(tidegate.QueueTimeout) as queued:
                ask.call(work)
            assert not queued.value.started and isinstance(queued.value, TimeoutError)
            assert queued.value.retry_after >= 1
        with pytest.raises(tidegate.QueueTimeout):
            with limiter.ask(timeout=0.02).slot():
                pass
        assert work.started == 1
    idle(limiter)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_of_run(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=5)
    with blocking() as work:

        async def main() -> None:
            with pytest.raises(tidegate.WaitTimeout):
                await limiter.ask(timeout=1).run(work)
            with pytest.raises(tidegate.QueueTimeout):
                await limiter.ask(timeout=0.02).run(work)
            with pytest.raises(tidegate.QueueTimeout):
                async with limiter.ask(timeout=0.02).slot():
                    pass

        anyio.run(main, backend=backend)
        assert work.started == 1
    idle(limiter)


def test_queue_timeout_ends_queued_calls_whoever_waits() -> None:
    limiter = tidegate.Limiter(1, queue=5, queue_timeout=0.03)
    with blocking() as work:
        running = limiter.submit(work, "answer")
        with pytest.raises(tidegate.QueueTimeout):
            limiter.submit(work).result(5)
        with pytest.raises(tidegate.QueueTimeout):
            with limiter.slot():
                pass
        with pytest.raises(tidegate.QueueTimeout):
            asyncio.run(limiter.run(work))
        assert not running.done()
        work.release.set()
        assert running.result(5) == "answer"
    idle(limiter)


def test_submit_gives_a_real_future() -> None:
    limiter = tidegate.Limiter(1)
    call = limiter.submit(pow, 2, 5)
    assert isinstance(call, concurrent.futures.Future)
    assert concurrent.futures.wait([call], 5).done == {call}
    assert call.result() == 32 and call.exception() is None and not call.cancel()
    heard: list[object] = []
    limiter.submit(pow, 2, 5).add_done_callback(heard.append)
    until(lambda: heard)


def test_asyncio_wraps_the_future_and_its_cancel_abandons() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:

        async def main() -> None:
            future = asyncio.wrap_future(limiter.submit(work))
            until(lambda: work.started)
            future.cancel()
            await asyncio.sleep(0)
            await until_async(lambda: limiter.statistics().abandoned == 1)

        asyncio.run(main())
    idle(limiter)


def test_result_that_runs_out_only_steps_away() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:
        call = limiter.submit(work, 3)
        until(lambda: call.started)
        with pytest.raises(concurrent.futures.TimeoutError):
            call.result(0.01)
        assert call.abandoned and not call.left and call.abandoned_at is not None
        work.release.set()
        assert call.result(5) == 3
    idle(limiter)
    assert limiter.statistics().abandoned_total == 1


def test_cancelling_twice_and_after_the_end() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:
        running, queued = limiter.submit(work), limiter.submit(work)
        until(lambda: running.started)
        assert queued.cancel() and queued.cancel() and queued.cancelled()
        assert not running.cancel() and not running.cancel()
        assert running.abandoned and not running.cancelled()
        assert limiter.statistics().abandoned_total == 1
        with pytest.raises(concurrent.futures.CancelledError):
            queued.result()
    idle(limiter)
    assert not running.cancel() and running.result() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_for_a_block(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=0)

    async def main() -> None:
        async with limiter.slot("mine") as call:
            assert call.label == "mine"
            assert limiter.statistics().borrowers == (call,)
            with pytest.raises(tidegate.QueueFull):
                await in_another_context(limiter)
        with pytest.raises(ValueError):
            async with limiter.slot():
                raise ValueError
        with anyio.move_on_after(0.01):
            async with limiter.slot():
                await anyio.sleep_forever()
        assert limiter.statistics().borrowed_tokens == 0
        assert limiter.statistics().finished_by_outcome["error"][0] == 1
        assert limiter.statistics().finished_by_outcome["cancelled"][0] == 1

    async def in_another_context(limiter: tidegate.Limiter) -> None:
        contextvars.Context().run(limiter.submit, int)

    anyio.run(main, backend=backend)
    with limiter.slot():
        assert limiter.statistics().attended == 1
    idle(limiter)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_that_is_cancelled_in_the_queue(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=2)

    async def main() -> None:
        with blocking() as work:
            running = limiter.submit(work)
            with anyio.move_on_after(0.02) as scope:
                async with limiter.slot():
                    raise AssertionError("no slot was free")
            assert scope.cancelled_caught and limiter.statistics().tasks_waiting == 0
            assert not running.done()

    anyio.run(main, backend=backend)
    idle(limiter)


def test_wrap_keeps_the_signature_and_runs_each_kind() -> None:
    limiter = tidegate.Limiter(1, queue=0)

    @limiter.wrap
    def plain(a: int, b: int = 2) -> int:
        """Adds."""
        assert limiter.statistics().attended == 1
        return a + b

    @limiter.wrap
    async def coroutine(a: int) -> int:
        assert limiter.statistics().attended == 1
        return a

    @limiter.wrap
    def items(n: int) -> Iterator[int]:
        for i in range(n):
            assert limiter.statistics().attended == 1
            yield i

    @limiter.wrap
    async def aitems(n: int) -> AsyncIterator[int]:
        for i in range(n):
            assert limiter.statistics().attended == 1
            yield i

    async def main() -> list[int]:
        assert await coroutine(4) == 4
        return [i async for i in aitems(3)]

    assert str(inspect.signature(plain)) == "(a: 'int', b: 'int' = 2) -> 'int'"
    assert (plain.__name__, plain.__doc__) == ("plain", "Adds.")
    assert plain(1) == 3 and list(items(3)) == [0, 1, 2] and asyncio.run(main()) == [0, 1, 2]
    assert limiter.statistics().started == 4
    idle(limiter)


def test_contextvars_are_carried_into_the_work_and_not_out() -> None:
    limiter = tidegate.Limiter(1)
    var = contextvars.ContextVar("var", default="none")

    def work() -> str:
        seen = var.get()
        var.set("inside")
        return seen

    async def main() -> None:
        var.set("outside")
        assert await limiter.run(work) == "outside"
        assert var.get() == "outside"

    asyncio.run(main())
    context = contextvars.copy_context()
    context.run(var.set, "thread")
    assert context.run(limiter.submit, work).result(5) == "thread"


def test_the_limit_is_set_while_calls_run() -> None:
    limiter = tidegate.Limiter(1, queue=20)
    with blocking() as work:
        calls = [limiter.submit(work) for _ in range(6)]
        until(lambda: work.active == 1)
        limiter.limit = 4
        until(lambda: work.active == 4)
        limiter.limit = 2
        assert (limiter.statistics().running, limiter.statistics().total_tokens) == (4, 2)
        assert limiter.statistics().tasks_waiting == 2
        limiter.queue = 0
        with pytest.raises(tidegate.QueueFull):
            limiter.submit(work)
        work.release.set()
        for call in calls:
            call.result(5)
        assert work.most == 4
    idle(limiter)


def test_a_hard_limit_is_an_allowance_for_leftovers() -> None:
    limiter = tidegate.Limiter(1, hard_limit=2, queue=0)
    with blocking() as work:
        first = limiter.submit(work)
        until(lambda: first.started)
        first.cancel()
        second = limiter.submit(work)
        until(lambda: second.started)
        second.cancel()
        with pytest.raises(tidegate.LeftoverFull) as caught:
            limiter.submit(work)
        assert not caught.value.started and limiter.statistics().leftovers_block
        limiter.limit = 2
        assert limiter.statistics().hard_limit == 3
    idle(limiter)


def test_the_higher_priority_is_served_first() -> None:
    limiter = tidegate.Limiter(1, queue=2)
    order: list[str] = []
    with blocking() as work:
        limiter.submit(work)
        low = limiter.ask(priority="low").submit(order.append, "low")
        high = limiter.ask(priority="high").submit(order.append, "high")
        work.release.set()
        low.result(5), high.result(5)
    assert order == ["high", "low"]
    idle(limiter)


def test_weight_flow_and_label_are_the_ledgers() -> None:
    limiter = tidegate.Limiter(2, queue=20, flow_limit=1)
    with blocking() as work:
        heavy = limiter.ask(weight=2, label="heavy").submit(work)
        until(lambda: heavy.started)
        light = limiter.submit(int)
        assert limiter.statistics().tasks_waiting == 1 and heavy.label == "heavy"
        work.release.set()
        assert light.result(5) == 0
        work.release.clear()
        calls = [limiter.ask(flow="tenant").submit(work) for _ in range(2)]
        until(lambda: calls[0].started)
        assert limiter.statistics().tasks_waiting == 1
        assert limiter.ask(flow="another").call(int) == 0
    idle(limiter)


def test_overload_sends_away_what_stood_too_long() -> None:
    limiter = tidegate.Limiter(1, queue=50, target_delay=0.001)
    errors: list[BaseException | None] = []
    with blocking() as work:
        limiter.submit(work)
        calls = [limiter.submit(threading.Event().wait, 0.005) for _ in range(40)]
        until(lambda: (limiter.statistics().oldest_queued or 0) > 0.02)
        work.release.set()
        concurrent.futures.wait(calls, 10)
        errors = [call.exception() for call in calls]
    assert any(isinstance(error, tidegate.Overloaded) and not error.started for error in errors)
    idle(limiter)


def test_statistics_name_what_anyio_and_trio_name() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:
        call = limiter.submit(work)
        waiting = limiter.submit(work)
        until(lambda: call.started)
        now = limiter.statistics()
        assert (now.borrowed_tokens, now.total_tokens, now.borrowers, now.tasks_waiting) == (1, 1, (call,), 1)
        other = anyio.CapacityLimiter
        assert list(type(now).__dataclass_fields__)[:3] == ["borrowed_tokens", "total_tokens", "borrowers"]
        assert other is not None and not waiting.done()
        assert now.oldest_running is not None and now.oldest_queued is not None and now.oldest_abandoned is None
    idle(limiter)


def test_close_sends_the_queue_away_and_leaves_the_running() -> None:
    limiter = tidegate.Limiter(1)
    with blocking() as work:
        running, queued = limiter.submit(work, 1), limiter.submit(work, 2)
        limiter.close()
        limiter.close()
        with pytest.raises(tidegate.Closed):
            queued.result(5)
        with pytest.raises(tidegate.Closed):
            limiter.submit(work)
        assert limiter.closed
        work.release.set()
        assert running.result(5) == 1
    idle(limiter)


def test_drain_reports_what_it_leaves() -> None:
    limiter = tidegate.Limiter(1, queue=3)
    with blocking() as work:
        call = limiter.submit(work)
        limiter.submit(work)
        until(lambda: call.started)
        report = limiter.drain(0.05)
        assert (report.finished, report.cancelled, len(report.still_running), report.clean) == (0, 1, 1, False)
        (left,) = report.still_running
        assert left.label == "Work" and "work.py" in left.stack and left.abandoned_for is None
        assert "self.release.wait" in limiter.dump()
    assert limiter.drain(5).clean


@pytest.mark.parametrize("backend", BACKENDS)
def test_adrain_waits_for_queue_and_work(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=3)
    with blocking() as work:
        calls = [limiter.submit(work) for _ in range(3)]

        async def main() -> None:
            async def release() -> None:
                await until_async(lambda: limiter.closed)
                work.release.set()

            async with anyio.create_task_group() as group:
                group.start_soon(release)
                report = await limiter.adrain(30)
            assert (report.finished, report.cancelled, report.clean) == (3, 0, True)

        anyio.run(main, backend=backend)
        assert all(call.done() for call in calls) and limiter.closed


def test_the_outcome_of_abandoned_work_is_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tidegate.Call[object]] = []
    limiter = tidegate.Limiter(1, on_leftover=heard.append)
    with blocking() as work, caplog.at_level("INFO", logger="tidegate"):

        def failing() -> None:
            work()
            raise OSError("late")

        call = limiter.submit(failing)
        until(lambda: work.started)
        call.cancel()
        work.release.set()
        until(lambda: heard)
        assert heard == [call] and isinstance(call.exception(), OSError)
        assert "OSError('late')" in caplog.text
    idle(limiter)


def test_no_thread_above_the_slots_and_idle_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate._workers.KEEP", 0.05)
    limiter = tidegate.Limiter(3, queue=200)
    calls = [limiter.submit(pow, 2, i) for i in range(150)]
    assert [call.result(5) for call in calls] == [2**i for i in range(150)]
    assert limiter.threads <= 3
    until(lambda: limiter.threads == 0)
    assert limiter.submit(pow, 2, 3).result(5) == 8


def test_many_threads_at_once() -> None:
    limiter = tidegate.Limiter(4, queue=1000)
    work = Work()
    work.release.set()

    def caller() -> None:
        for i in range(100):
            if i % 3 == 0:
                limiter.submit(work).cancel()
            elif i % 3 == 1:
                limiter.call(work)
            else:
                limiter.submit(work).result(10)

    threads = [threading.Thread(target=caller) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    idle(limiter)
    assert work.most <= 4 and limiter.threads <= 4
