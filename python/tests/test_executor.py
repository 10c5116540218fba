"""The limiter as a thread pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest
from server import until
from work import blocking, idle

import tidegate


def test_it_is_a_pool_for_loop_and_libraries() -> None:
    limiter = tidegate.Limiter(2, queue=2)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        executor = limiter.executor()
        assert isinstance(executor, concurrent.futures.ThreadPoolExecutor)
        loop.set_default_executor(executor)
        assert await asyncio.to_thread(pow, 2, 3) == 8
        assert await loop.run_in_executor(executor, pow, 2, 4) == 16
        infos = await loop.getaddrinfo("localhost", 80)
        assert infos

    asyncio.run(main())
    assert limiter.statistics().finished_by_outcome["ok"] == (3, 0)
    idle(limiter)


def test_a_waiter_that_leaves_through_asyncio_is_counted() -> None:
    limiter = tidegate.Limiter(1, queue=1)
    with blocking() as work:

        async def main() -> None:
            asyncio.get_running_loop().set_default_executor(limiter.executor())
            for patience in (1, 0.02, 0.02):  # the first has to begin in it
                with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                    await asyncio.wait_for(asyncio.to_thread(work), patience)
                while limiter.statistics().abandoned != 1 or limiter.statistics().tasks_waiting:
                    await asyncio.sleep(0.001)
            assert limiter.statistics().abandoned == 1 and work.started == 1

        asyncio.run(main())  # which shuts the executor down, and does not wait for the leftover
        assert work.active == 1
    idle(limiter)


def test_map_submits_no_more_than_there_is_room_for() -> None:
    limiter = tidegate.Limiter(2, queue=3)
    executor = limiter.executor()
    assert list(executor.map(pow, [2] * 100, range(100))) == [2**i for i in range(100)]
    assert list(executor.map(abs, [-1, -2], buffersize=1)) == [1, 2]
    assert list(executor.map(abs, [])) == []
    with pytest.raises(ZeroDivisionError):
        list(executor.map(lambda n: 1 // n, range(-20, 20)))
    with blocking() as work:
        with pytest.raises((TimeoutError, concurrent.futures.TimeoutError)):
            list(executor.map(work, range(20), timeout=0.02))
        until(lambda: limiter.statistics().tasks_waiting == 0)
    idle(limiter)


def test_shutdown_waits_for_who_is_waited_for() -> None:
    limiter = tidegate.Limiter(1, queue=2)
    executor = limiter.executor()
    with blocking() as work:
        running, queued = executor.submit(work, 1), executor.submit(work, 2)
        until(lambda: work.active)

        def release() -> None:
            until(lambda: executor._over)
            work.release.set()

        releaser = threading.Thread(target=release)
        releaser.start()
        executor.shutdown()
        releaser.join()
        assert running.result(0) == 1 and queued.result(0) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)
    assert limiter.submit(int).result(5) == 0  # the limiter is not closed by it
    idle(limiter)


def test_shutdown_that_cancels_and_leaves() -> None:
    limiter = tidegate.Limiter(1, queue=2)
    with blocking() as work:
        with limiter.executor() as executor:
            running, queued = executor.submit(work), executor.submit(work)
            until(lambda: work.active)
            running.cancel()
            executor.shutdown(wait=False, cancel_futures=True)
        assert queued.cancelled() and running.abandoned
    idle(limiter)


def test_a_full_queue_is_said() -> None:
    limiter = tidegate.Limiter(1, queue=0)
    with blocking() as work, limiter.executor() as executor:
        running = executor.submit(work)
        with pytest.raises(tidegate.QueueFull):
            executor.submit(work)
        work.release.set()
        running.result(5)
