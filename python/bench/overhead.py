"""What a call of `Limiter.run` costs beside one of `asyncio.to_thread`, in turns in one process, by the clock and in
processor time: `python python/bench/overhead.py`. Takes half a minute, on a machine that has nothing else to do. The
exit code says whether it was more in three of four rounds."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tidegate

CALLS, ROUNDS = 256, 301
THREADS = 6
"""As many for either: what `asyncio.to_thread` has by default on two processors."""

Run = Callable[[Callable[[], None]], Awaitable[Any]]


def nothing() -> None:
    pass


async def at_once(run: Run, calls: int) -> tuple[float, float]:
    """Microseconds of a call, by the clock and of the processors, with so many at once."""
    clock, processor = time.perf_counter(), time.process_time()
    if calls == 1:
        for _ in range(CALLS):
            await run(nothing)
    else:
        for _ in range(CALLS // calls):
            await asyncio.gather(*(run(nothing) for _ in range(calls)))
    return (time.perf_counter() - clock) / CALLS * 1e6, (time.process_time() - processor) / CALLS * 1e6


def spread(values: list[float], unit: str = "") -> str:
    """Median, and between which values half of them are."""
    low, middle, high = statistics.quantiles(values, n=4)
    digits = 1 if unit else 2
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


async def main() -> int:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    limiter = tidegate.Limiter(THREADS, queue=64)
    worse = 0
    print(f"Python {sys.version.split()[0]}, {ROUNDS} rounds of {CALLS} calls, in turns; median (half of the rounds)")
    for calls in (1, 8, 64):
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        for number in range(ROUNDS + 2):
            pair: list[tuple[list[tuple[float, float]], Run]] = [(theirs, asyncio.to_thread), (ours, limiter.run)]
            for times, run in pair if number % 2 else reversed(pair):
                took = await at_once(run, calls)
                if number > 1:  # the first two are for warmth
                    times.append(took)
        for which, name in ((0, "by the clock"), (1, "processor time")):
            mine, other = [took[which] for took in ours], [took[which] for took in theirs]
            quotients = [a / b for a, b in zip(mine, other, strict=True)]
            print(
                f"{calls:2} at once, {name:14}: Limiter.run {spread(mine, ' us')}, "
                f"asyncio.to_thread {spread(other, ' us')}, quotient {spread(quotients)}"
            )
            worse += statistics.quantiles(quotients, n=4)[0] > 1
    return worse


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
