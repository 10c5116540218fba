"""Streams hold their slot to the end, not to the first item."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import openai
import pytest
from server import serving, until
from work import frames, idle

import tidegate

BACKENDS = ["asyncio", "trio"]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def count(limiter: tidegate.Limiter, n: int) -> Iterator[int]:
    for i in range(n):
        assert limiter.statistics().running == 1
        yield i


async def acount(limiter: tidegate.Limiter, n: int) -> AsyncIterator[int]:
    for i in range(n):
        assert limiter.statistics().running == 1
        yield i


def test_read_in_a_thread() -> None:
    limiter = tidegate.Limiter(1, queue=0)
    assert list(limiter.stream(count, limiter, 5)) == [0, 1, 2, 3, 4]
    assert list(limiter.stream([1, 2])) == [1, 2]
    with limiter.stream(count, limiter, 5) as items:
        assert next(items) == 0
        assert limiter.statistics().attended == 1
        with pytest.raises(tidegate.QueueFull):
            threading_submit(limiter)
    assert limiter.statistics().borrowed_tokens == 0
    for item in limiter.stream(count, limiter, 5):
        if item == 1:
            break
    idle(limiter)


def threading_submit(limiter: tidegate.Limiter) -> None:
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            limiter.submit(int)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_in_a_task(backend: str) -> None:
    limiter = tidegate.Limiter(1, queue=0)

    async def main() -> None:
        assert [i async for i in limiter.stream(acount, limiter, 3)] == [0, 1, 2]
        assert [i async for i in limiter.stream(acount(limiter, 3))] == [0, 1, 2]
        assert [i async for i in limiter.stream(count, limiter, 100)] == list(range(100))
        async with limiter.stream(count, limiter, 1000) as items:
            async for item in items:
                if item == 3:
                    break
        with anyio.fail_after(30):
            while limiter.statistics().borrowed_tokens:
                await anyio.sleep(0.001)

    anyio.run(main, backend=backend)
    idle(limiter)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_come_where_the_items_did(backend: str) -> None:
    limiter = tidegate.Limiter(1)

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("half-way")

    async def main() -> None:
        seen = []
        with pytest.raises(KeyError, match="half-way"):
            async for item in limiter.stream(broken):
                seen.append(item)
        assert seen == [1]

    anyio.run(main, backend=backend)
    with pytest.raises(KeyError):
        list(limiter.stream(broken))
    idle(limiter)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_blocking_sdk_stream_in_a_task_ends_with_its_reader(backend: str) -> None:
    limiter = tidegate.Limiter(1)
    with serving("events") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="k")

        async def main() -> None:
            seen = 0
            with anyio.move_on_after(30) as scope:
                async for _ in limiter.stream(
                    client.chat.completions.create, model="m", messages=MESSAGES, stream=True
                ):
                    seen += 1
                    if seen == 3:
                        scope.cancel()
            assert seen == 3

        anyio.run(main, backend=backend)
        until(lambda: len(server.closed) == 1)
    idle(limiter)


def test_real_streams_of_three() -> None:
    limiter = tidegate.Limiter(1)
    with serving("three") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="k")
        asynchronous = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k")

        async def main() -> int:
            ways = [client.chat.completions.create, asynchronous.chat.completions.create]
            total = 0
            for create in ways:
                async for _ in limiter.stream(create, model="m", messages=MESSAGES, stream=True):  # type: ignore[call-overload]
                    total += 1
            await asynchronous.close()
            return total

        assert len(list(limiter.stream(client.chat.completions.create, model="m", messages=MESSAGES, stream=True))) == 3
        assert asyncio.run(main()) == 6
    idle(limiter)
    assert limiter.statistics().started == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_others_run_while_a_quick_stream_is_read(backend: str) -> None:
    limiter = tidegate.Limiter(1)
    steps = 0

    async def other() -> None:
        nonlocal steps
        while True:
            await anyio.sleep(0)
            steps += 1

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(other)
            assert [item async for item in limiter.stream(range, 500)] == list(range(500))
            assert steps > 250
            group.cancel_scope.cancel()

    anyio.run(main, backend=backend)
    idle(limiter)


def test_a_slow_reader_holds_the_thread_back() -> None:
    limiter = tidegate.Limiter(1)
    made = []

    def items() -> Iterator[int]:
        for i in range(1000):
            made.append(i)
            yield i

    async def main() -> None:
        async with limiter.stream(items) as stream:
            assert await stream.__anext__() == 0
            (call,) = limiter.statistics().borrowers
            while not (frames(call)[:1] == ["wait"] and "put" in frames(call)):
                await asyncio.sleep(0.001)
            assert len(made) <= 20

    asyncio.run(main())
    idle(limiter)
