"""The story as a demonstration on loopback: `python -m tidegate.probe`.

A model server that generates for three seconds, or until its client has gone; a limit of one; three calls of a blocking
client, each given up after 0.3 seconds; then the process leaves. How many really ran at once, what the queue did, how
long the server went on, and how long the exit took; for what is usual, and for this package."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

GENERATION, PATIENCE, CALLS, EXIT_MOST = 3.0, 0.3, 3, 15.0


class _Server:
    """Generates for three seconds a request, or until the client has gone."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.active = self.requests = 0
        self.last_end = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._generate, args=(connection,), daemon=True).start()

    def _generate(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(0.002)
            with self._lock:
                self.active += 1
                self.requests += 1
            end = time.monotonic() + GENERATION
            while time.monotonic() < end:
                try:
                    if connection.recv(65536) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            with self._lock:
                self.active -= 1
                self.last_end = time.monotonic()


class _Client:
    """A blocking client that counts how many of its calls really run at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._active = self.most = 0

    def ask(self) -> None:
        with self._lock:
            self._active += 1
            self.most = max(self.most, self._active)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.request("GET", "/")
            connection.getresponse().read()
        finally:
            with self._lock:
                self._active -= 1


async def _semaphore(ask: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    gate = asyncio.Semaphore(1)

    async def call() -> None:
        async with gate:
            await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE)

    return call


async def _pool(ask: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    pool = ThreadPoolExecutor(1)

    async def call() -> None:
        await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, ask), PATIENCE)

    return call


async def _anyio(ask: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    import anyio
    import anyio.to_thread

    limiter = anyio.CapacityLimiter(1)

    async def call() -> None:
        with anyio.fail_after(PATIENCE):
            await anyio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=limiter)

    return call


async def _tidegate(ask: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    import tidegate

    limiter = tidegate.Limiter(1)

    async def call() -> None:
        await asyncio.wait_for(limiter.run(ask), PATIENCE)

    return call


CONTENDERS = {
    "Semaphore(1) + to_thread": _semaphore,
    "anyio, CapacityLimiter(1)": _anyio,
    "ThreadPoolExecutor(1)": _pool,
    "tidegate.Limiter(1)": _tidegate,
}
OURS = "tidegate.Limiter(1)"


@dataclass(frozen=True)
class Row:
    name: str
    most: int
    """Calls of the client that ran at once."""
    requests: int
    went_on: float
    """How long the server worked after the last caller had given up, in seconds."""
    exit: float | None
    """How long the process took to leave after that; None if it had to be killed."""


def _contend(name: str, port: int) -> None:
    """One contender, in a process of its own. Says when its callers have given up, and how many calls ran at once."""

    async def main() -> None:
        client = _Client(port)
        call = await CONTENDERS[name](client.ask)
        for _ in range(CALLS):
            try:
                await call()
            except (TimeoutError, asyncio.TimeoutError):
                pass
        print(client.most, flush=True)

    asyncio.run(main())


def measure(name: str) -> Row:
    server = _Server()
    command = [sys.executable, "-m", "tidegate.probe", "--contender", name, "--port", str(server.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        most = int(process.stdout.readline() or "0")
        gave_up = time.monotonic()
        took: float | None = None
        try:
            process.wait(EXIT_MOST)
            took = time.monotonic() - gave_up
        except subprocess.TimeoutExpired:
            process.kill()
    while server.active:
        time.sleep(0.01)
    return Row(name, most, server.requests, max(0.0, server.last_end - gave_up), took)


def table(rows: list[Row]) -> str:
    head = ("a limit of one", "really ran", "requests", "server went on", "exit took")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        took = f"killed after {EXIT_MOST:.0f} s" if row.exit is None else f"{row.exit:.2f} s"
        lines.append((row.name, str(row.most), str(row.requests), f"{row.went_on:.2f} s", took))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main() -> int:
    """0 if this package ran no more than its limit, and neither the server nor the exit went on."""
    parser = argparse.ArgumentParser(prog="python -m tidegate.probe", description=__doc__)
    parser.add_argument("--contender", choices=list(CONTENDERS), help="runs one of them; for the probe itself")
    parser.add_argument("--port", type=int, default=0, help="where the model server of --contender is")
    arguments = parser.parse_args()
    if arguments.contender:
        _contend(arguments.contender, arguments.port)
        return 0
    print(f"{CALLS} calls, each given up after {PATIENCE} s, of a server that takes {GENERATION:.0f} s:\n")
    rows: list[Row] = []
    for name in CONTENDERS:
        if name.startswith("anyio") and importlib.util.find_spec("anyio") is None:
            print(f"{name}: anyio is not installed, left out")
            continue
        rows.append(measure(name))
    print(table(rows))
    ours = next(row for row in rows if row.name == OURS)
    return 0 if ours.most == 1 and ours.went_on < 1 and ours.exit is not None and ours.exit < GENERATION - 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
