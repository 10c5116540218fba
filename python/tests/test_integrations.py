"""The frameworks and exporters that a limiter meets, as their users have them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import prometheus_client
import uvicorn
from fastapi import FastAPI, HTTPException
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import run_in_executor
from langchain_openai import ChatOpenAI
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from server import Server, serving, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from work import blocking, idle

import tidegate
import tidegate.opentelemetry
import tidegate.prometheus

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@contextlib.contextmanager
def web(app: Any) -> Iterator[str]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def fast(limiter: tidegate.Limiter, model: Server) -> FastAPI:
    app = FastAPI()
    client = openai.OpenAI(base_url=model.url + "/v1", api_key="k")

    @app.get("/def")
    def plain(patience: float) -> str:
        try:
            ask = limiter.ask(timeout=patience)
            return str(
                ask.call(client.chat.completions.create, model="m", messages=MESSAGES).choices[0].message.content
            )
        except tidegate.WaitTimeout as late:
            raise HTTPException(504, "started") from late
        except tidegate.Rejected as rejected:
            raise HTTPException(503, headers={"retry-after": f"{rejected.retry_after:.0f}"}) from rejected

    @app.get("/async")
    async def asynchronous(patience: float) -> str:
        try:
            answer = limiter.run(client.chat.completions.create, model="m", messages=MESSAGES)
            return str((await asyncio.wait_for(answer, patience)).choices[0].message.content)
        except (TimeoutError, asyncio.TimeoutError) as late:
            raise HTTPException(504) from late

    return app


def test_fastapi_endpoints_of_both_kinds() -> None:
    for path in ("/def", "/async"):
        limiter = tidegate.Limiter(1)
        with serving("hang") as model, web(fast(limiter, model)) as url:
            for _ in range(2):
                left = httpx.get(url + path, params={"patience": 0.1}, timeout=20)
                assert left.status_code == 504
                idle(limiter)
                until(lambda: model.active == 0)  # noqa: B023
            model.modes = ["answer"]
            answer = httpx.get(url + path, params={"patience": 15}, timeout=20)
            assert (answer.status_code, answer.json()) == (200, "hello")
            assert len(model.requests) == len(model.closed) + 1  # one may have been left before its request was sent
        idle(limiter)


def test_fastapi_says_when_it_is_full() -> None:
    limiter = tidegate.Limiter(1, queue=0)
    with serving("answer") as model, web(fast(limiter, model)) as url, limiter.slot():
        answer = httpx.get(url + "/def", params={"patience": 15}, timeout=20)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1


def test_starlette_ends_the_work_when_the_client_leaves() -> None:
    limiter = tidegate.Limiter(1)
    with serving("hang") as model:
        client = openai.OpenAI(base_url=model.url + "/v1", api_key="k")

        async def endpoint(request: Request) -> PlainTextResponse:
            work = asyncio.ensure_future(limiter.run(client.chat.completions.create, model="m", messages=MESSAGES))
            while not work.done():
                if await request.is_disconnected():
                    work.cancel()
                    break
                await asyncio.sleep(0.005)
            with contextlib.suppress(asyncio.CancelledError):
                await work
            return PlainTextResponse("over")

        with web(Starlette(routes=[Route("/", endpoint)])) as url:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.get(url, timeout=0.2)
            until(lambda: len(model.closed) == 1)
    idle(limiter)


def test_langchain_models_and_executor() -> None:
    limiter = tidegate.Limiter(1, queue=4)
    with serving("answer", "answer", "answer", "hang") as server:
        model = ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="k", stream_usage=False)  # type: ignore[arg-type]

        async def main() -> None:
            assert (await limiter.run(model.invoke, "hi")).content == "hello"
            answer = await run_in_executor(limiter.executor(), model.invoke, "hi")
            assert answer.content == "hello"
            chain = RunnableLambda(limiter.wrap(lambda text: model.invoke(text)))
            assert (await chain.ainvoke("hi")).content == "hello"
            before = len(server.requests)
            task = asyncio.ensure_future(limiter.run(model.invoke, "hi"))
            while len(server.requests) == before:
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(main())
        until(lambda: len(server.closed) == 1)
        assert len(server.requests) == 4
    idle(limiter)


def test_an_asynchronous_sdk_in_a_slot() -> None:
    limiter = tidegate.Limiter(1)
    with serving("answer", "hang") as server:

        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k") as client:
                async with limiter.slot():
                    await client.chat.completions.create(model="m", messages=MESSAGES)
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):

                    async def bounded() -> None:
                        async with limiter.slot():
                            await client.chat.completions.create(model="m", messages=MESSAGES)

                    await asyncio.wait_for(bounded(), 0.1)
                assert limiter.statistics().borrowed_tokens == 0

        asyncio.run(main())
        until(lambda: len(server.closed) == 1)
    idle(limiter)


def use(limiter: tidegate.Limiter) -> None:
    """One call that ends well, one that is left, one that leaves the queue, one that finds it full."""
    limiter.submit(int).result(5)
    with blocking() as work:
        left = limiter.submit(work)
        until(lambda: left.started)
        queued = limiter.submit(work)
        with contextlib.suppress(tidegate.QueueFull):
            limiter.submit(work)
        left.cancel(), queued.cancel()
    idle(limiter)


def test_prometheus() -> None:
    registry = prometheus_client.CollectorRegistry()
    tidegate.prometheus.register(registry)
    limiter = tidegate.Limiter(1, queue=1, name="for-prometheus")
    use(limiter)
    unnamed = tidegate.Limiter(1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tidegate_limiter_{name}", {"limiter": "for-prometheus", **labels})

    assert value("limit") == 1 and value("queued") == 0 and value("abandoned") == 0
    assert value("offered_total") == 4 and value("started_total") == 2 and value("left_by_waiter_total") == 1
    assert value("rejected_total", reason="queue_full") == 1
    assert value("cancelled_before_start_total", by="caller") == 1
    assert value("finished_total", outcome="ok", attended="true") == 1
    assert value("finished_total", outcome="ok", attended="false") == 1
    assert (value("abandoned_seconds_total") or 0) > 0
    text = prometheus_client.generate_latest(registry).decode()
    assert 'limiter=""' not in text and unnamed.limit == 1


def test_opentelemetry() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    tidegate.opentelemetry.instrument(provider.get_meter("test"))
    limiter = tidegate.Limiter(1, queue=1, name="for-otel")
    use(limiter)
    found: dict[tuple[Any, ...], float] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes or {})
            if attributes.pop("limiter") == "for-otel":
                found[(metric.name, *attributes.values())] = point.value  # type: ignore[union-attr]
    assert found["tidegate.limiter.limit",] == 1
    assert found["tidegate.limiter.offered",] == 4
    assert found["tidegate.limiter.finished", "ok", "false"] == 1
    assert found["tidegate.limiter.rejected", "queue_full"] == 1
    assert limiter.name == "for-otel"
    provider.shutdown()


def test_the_probe_tells_the_story() -> None:
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "tidegate.probe"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:26].strip(): line[26:].split() for line in done.stdout.splitlines() if "(1)" in line}
    assert rows["tidegate.Limiter(1)"][0] == "1", done.stdout
    assert rows["Semaphore(1) + to_thread"][0] == "3", done.stdout
    assert rows["ThreadPoolExecutor(1)"][0] == "1", done.stdout
    assert time.monotonic() - begin < 60
