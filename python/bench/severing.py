"""How soon the thread of a call has ended when its time is up: `python python/bench/severing.py`, a minute; with
numbers, so many calls at once.

`openai.OpenAI` with its own retries, against a server in another process that drips a byte every 10 ms without end. As
the server must see: one request a call, and each connection closed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

import tidegate

CALLS = 1_000
SERVER = """
import sys
from server import Server, until
server = Server("drip")
print(server.port, flush=True)
sys.stdin.readline()
until(lambda: server.active == 0)
print(len(server.requests), len(server.closed), server.connections, flush=True)
"""
MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def one(limiter: tidegate.Limiter, client: openai.OpenAI, patience: float) -> tuple[float, float]:
    """Milliseconds from the end of its time, and from the waiter's leaving, to the end of the thread's work."""
    begin = time.monotonic()
    try:
        await limiter.ask(timeout=patience).run(client.chat.completions.create, model="m", messages=MESSAGES)
    except tidegate.WaitTimeout as late:
        call = late.call
    except tidegate.QueueTimeout:
        return await one(limiter, client, patience)  # no thread had begun it: nothing to end
    while not call.done():
        await asyncio.sleep(0.001)
    assert call.ended_at is not None and call.abandoned_at is not None
    return (call.ended_at - begin - patience) * 1e3, (call.ended_at - call.abandoned_at) * 1e3


async def many(limiter: tidegate.Limiter, client: openai.OpenAI, at_once: int) -> list[tuple[float, float]]:
    gate = asyncio.Semaphore(at_once)

    async def gated() -> tuple[float, float]:
        async with gate:
            return await one(limiter, client, 0.025 * at_once)

    await asyncio.gather(*(gated() for _ in range(at_once * 4)))  # for warmth: threads, and what the SDK loads late
    return await asyncio.gather(*(gated() for _ in range(CALLS)))


def said(values: list[float]) -> str:
    values = sorted(values)
    within = sum(value <= 10 for value in values)
    return (
        f"median {values[len(values) // 2]:.2f} ms, p99 {values[len(values) * 99 // 100]:.2f} ms, "
        f"most {values[-1]:.2f} ms, {within} of {len(values)} within 10 ms"
    )


def main() -> int:
    tests = Path(__file__).parents[1] / "tests"
    for at_once in (int(number) for number in sys.argv[1:] or ("1", "4")):
        command = [sys.executable, "-c", SERVER]
        with subprocess.Popen(command, cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None and server.stdout is not None
            port = int(server.stdout.readline())
            limiter = tidegate.Limiter(at_once, queue=0)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
                times = asyncio.run(many(limiter, client, at_once))
            server.stdin.write("\n")
            server.stdin.flush()
            requests, closed, connections = server.stdout.readline().split()
        print(f"{at_once} at once, after the time was up: {said([total for total, _ in times])}")
        print(f"{at_once} at once, after the waiter left: {said([own for _, own in times])}")
        print(f"  the server had {requests} requests on {connections} connections, and saw {closed} closed")
        if limiter.statistics().borrowed_tokens or limiter.threads > at_once or requests != closed:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
