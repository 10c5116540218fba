"""What a call costs beside what it replaces, in turns in one process: `python python/bench/overhead.py`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import tidegate

CALLS, ROUNDS = 1_000, 15


def nothing() -> None:
    pass


async def one_after_the_other(run: Callable[[Callable[[], None]], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        await run(nothing)
    return (time.perf_counter() - begin) / CALLS * 1e6


async def in_eights(run: Callable[[Callable[[], None]], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS // 8):
        await asyncio.gather(*(run(nothing) for _ in range(8)))
    return (time.perf_counter() - begin) / CALLS * 1e6


async def main() -> int:
    limiter = tidegate.Limiter(8, queue=8)
    worse = 0
    for shape in (one_after_the_other, in_eights):
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(ROUNDS + 1):
            pair = [(theirs, asyncio.to_thread), (ours, limiter.run)]
            for times, run in pair if number % 2 else reversed(pair):
                took = await shape(run)
                if number:  # the first is for warmth
                    times.append(took)
        quotients = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        middle = quotients[ROUNDS // 2]
        print(
            f"{shape.__name__}: Limiter.run {statistics.median(ours):.1f} us ({min(ours):.1f} to {max(ours):.1f}), "
            f"asyncio.to_thread {statistics.median(theirs):.1f} us ({min(theirs):.1f} to {max(theirs):.1f}), "
            f"quotient {middle:.2f} ({quotients[0]:.2f} to {quotients[-1]:.2f})"
        )
        worse += middle > 1
    return worse


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
