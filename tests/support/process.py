"""Starts the servers that the tests talk to, keeps what they print, and ends them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"


def until(condition: Callable[[], object], within: float, what: str, every: float = 0.01):
    """The first truthy value of `condition`; an error that says `what` never came if it takes too long."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what}")
        time.sleep(every)
    return value


def _ports() -> Iterator[int]:
    """Ports out of which the kernel picks none, in an order of this process, each once."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10_000, low), *range(high + 1, 65_536)]
    random.shuffle(ports)
    return iter(ports)


_PORTS = _ports()


def free_port() -> int:
    """A port on which nobody listens, never the same one twice.

    One that the kernel picks (port 0) is free again as soon as it is known: the kernel may give it to the next who
    asks, or to a client's socket.
    """
    for port in _PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def inherited() -> dict[str, str]:
    """The environment, less what configures the gateway and what the tests say to each other."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


def yields() -> None:
    """In a child with a session of its own: whoever else wants a core has it first.

    For servers that spin. Some kernels weigh sessions and not processes (autogroup): a `nice` alone does nothing there.
    """
    os.nice(10)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as weight:
        weight.write("10")


class Server:
    """One child process. It is ready when `ready()` says so, and its output goes to a file."""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str] | None = None, boot: float = 20, spins: bool = False
    ):
        folder = CACHE / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log_file = folder / f"{name}-{os.getpid()}-{free_port()}.log"
        with self.log_file.open("wb") as log:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited() | (env or {}),
                start_new_session=True,  # a group of its own, so that nothing it started outlives it
                preexec_fn=yields if spins else None,
            )
        try:
            until(self._up, boot, f"{name} is ready")
        except BaseException as error:
            self.stop()
            error.add_note(f"{' '.join(command)}\n{self.tail()}")
            raise

    def ready(self) -> bool:
        raise NotImplementedError

    def _up(self) -> bool:
        if self.child.poll() is not None:
            raise AssertionError(f"{self.name} ended with code {self.child.returncode} before it was ready")
        return self.ready()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def stop(self, grace: float = 5) -> int:
        """SIGTERM, then SIGKILL to what is left of its group; the exit code. Safe to call twice."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        return self.child.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
