"""What has to be seen from outside: memory, forks, subinterpreters, exits. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest


def run(program: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout)


@pytest.mark.timeout(240)
def test_a_hundred_thousand_cancelled_entries_hold_no_memory() -> None:
    """No block of Python's is held, nearly all memory goes back to the system when the allocator is asked for it, and
    the third hundred thousand need no more than the second did."""
    done = run(
        """
import ctypes, gc, os, sys, sysconfig, threading, tidegate

COUNT = 100_000
trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

limiter = tidegate.Limiter(1, queue=COUNT, queue_timeout=3600)
release = threading.Event()
running = limiter.submit(release.wait)
while not running.started: pass
for _ in range(100):  # what is made once
    limiter.submit(release.wait, bytes(64)).cancel()
before, blocks = resident(), sys.getallocatedblocks()
after = []
for _ in range(3):
    queued = [limiter.submit(release.wait, bytes(64)) for _ in range(COUNT)]
    full = resident()
    assert limiter.statistics().tasks_waiting == COUNT
    for call in queued:
        assert call.cancel()
    del queued, call
    after.append(resident())
    assert limiter.statistics().tasks_waiting == 0
    held = sys.getallocatedblocks() - blocks
    assert held < COUNT / 100, f"{held} blocks of memory are held for nobody"
text = f"resident: {before} MB, {full} MB with all of them queued, {after} after each round"
assert full - before > 100, text
assert after[2] - after[1] < (full - before) / 10, text
if trim is not None and not sysconfig.get_config_var("Py_GIL_DISABLED"):  # which has another allocator
    trim(0)
    text += f", {resident()} MB when trimmed"
    assert resident() - before < (full - before) / 10, text
release.set()
running.result(5)
print(text)
""",
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_a_fork_begins_with_an_empty_limiter() -> None:
    done = run("""
import os, threading, tidegate
limiter = tidegate.Limiter(1, queue=1)
release = threading.Event()
call, queued = limiter.submit(release.wait), limiter.submit(int)
while not call.started: pass
if (child := os.fork()) == 0:
    assert limiter.statistics().borrowed_tokens == 0 and limiter.statistics().tasks_waiting == 0
    assert limiter.submit(pow, 2, 3).result(5) == 8
    for old in (call, queued):
        for use in (old.result, old.cancel, old.exception):
            try:
                use()
            except tidegate.Lost as lost:
                assert "in the parent process" in str(lost)
            else:
                raise SystemExit("no error")
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert limiter.statistics().borrowed_tokens == 1
release.set()
assert queued.result(5) == 0
print("ok")
""")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_fork_from_inside_the_work() -> None:
    done = run("""
import os, tidegate
limiter = tidegate.Limiter(1, queue=1)
def work():
    if (child := os.fork()) == 0:
        limiter.submit(pow, 2, 3).result(5)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def returns():
    return os.getpid(), os.fork()
assert limiter.submit(work).result(10) == 9
here, child = limiter.submit(returns).result(10)
if os.getpid() == here:
    assert os.waitpid(child, 0)[1] == 0
    print("ok")
""")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_subinterpreter_is_told_where_to_go() -> None:
    done = run("""
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
number = interpreters.create()
text = '''
try:
    import tidegate
except ImportError as error:
    print(error)
'''
interpreters.run_string(number, text) if hasattr(interpreters, "run_string") else interpreters.exec(number, text)
""")
    assert "tidegate does not work in a subinterpreter" in done.stdout, (done.stdout, done.stderr)


@pytest.mark.parametrize(
    "leftover",
    [
        "limiter.submit(threading.Event().wait)",
        "asyncio.run(leave())",
        "threading.Thread(target=limiter.call, args=(threading.Event().wait,), daemon=True).start()",
        "limiter.ask(timeout=2).call(threading.Event().wait)",
        "asyncio.run(default())",
    ],
)
def test_exit_never_hangs_and_names_what_is_left(leftover: str) -> None:
    done = run(f"""
import asyncio, contextlib, threading, time, tidegate
limiter = tidegate.Limiter(1, queue=5, name="models")
async def leave():
    await asyncio.wait_for(limiter.run(threading.Event().wait), 2)
async def default():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(limiter.executor())
    await asyncio.wait_for(asyncio.to_thread(threading.Event().wait), 2)
with contextlib.suppress(Exception, asyncio.TimeoutError):
    {leftover}
while not limiter.statistics().running: time.sleep(0.001)
limiter.submit(print, "never printed")
""")
    assert done.returncode == 0 and done.stdout == ""
    assert "tidegate: <Limiter 'models' 1> leaves 1 call running at exit:\n  call 1 " in done.stderr, done.stderr


def test_exit_in_the_middle_of_much_work() -> None:
    """Threads that the interpreter ends while they work, sleep and give slots back: no crash, no hang."""
    for _ in range(5):
        done = run("""
import sys, threading, time, tidegate
limiter = tidegate.Limiter(8, queue=1000)
def work():
    time.sleep(0.0005)
def feed():
    while True:
        try:
            limiter.submit(work).cancel()
            limiter.submit(work)
        except tidegate.Rejected:
            pass
for _ in range(4):
    threading.Thread(target=feed, daemon=True).start()
while limiter.statistics().finished < 200: time.sleep(0.001)
sys.exit(5)
""")
        assert done.returncode == 5, done.stderr
        assert "Fatal" not in done.stderr and "panick" not in done.stderr


@pytest.mark.timeout(240)
def test_the_fixture_fails_a_test_that_leaves_work_running(tmp_path: Any) -> None:
    (tmp_path / "test_it.py").write_text("""
import threading, tidegate
limiter = tidegate.Limiter(2)
def test_leaves(no_leftovers):
    limiter.submit(threading.Event().wait)
def test_ends(no_leftovers):
    limiter.submit(threading.Event().wait, 0.01)
def test_unwatched():
    limiter.submit(int)
""")
    # Not the plugins of others: what they import takes long.
    options = ["-p", "no:cacheprovider", "-p", "no:langsmith_plugin", "-p", "no:anyio"]
    plugin = [] if _installed() else ["-p", "tidegate.pytest_plugin"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        *plugin,
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "3 passed, 1 error" in done.stdout and "the test left 1 of its calls running" in done.stdout, done.stdout
    done = subprocess.run(
        [*command, "-o", "tidegate_no_leftovers=true", "-k", "leaves"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == "tidegate.pytest_plugin" for entry in entry_points(group="pytest11"))
