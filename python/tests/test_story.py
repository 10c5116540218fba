"""The story: a limit of one that ran three."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
import threading
import tidegate

async def probe():
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(1)
    limiter = tidegate.Limiter(1)
    started = asyncio.Queue()
    never = threading.Event()
    lock = threading.Lock()
    active = 0

    def blocking():
        nonlocal active
        with lock:
            active += 1
        loop.call_soon_threadsafe(started.put_nowait, None)
        never.wait()

    for i in range(3):
        async with gate:
            task = asyncio.create_task(CALL(blocking))
            if i == 0:
                await started.get()
            try:
                await asyncio.wait_for(task, timeout=0.02)
            except (TimeoutError, asyncio.TimeoutError):
                pass
    with lock:
        print(f"active={active}")

asyncio.run(probe())
"""


def test_the_program_with_one_line_changed_runs_one_and_exits_at_once(tmp_path: Path) -> None:
    program = tmp_path / "story.py"
    program.write_text(PROGRAM.replace("CALL", "limiter.run"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "active=1\n"), done.stderr
    assert "leaves 1 call running at exit" in done.stderr
    assert "'probe.<locals>.blocking', running for" in done.stderr


def test_the_program_as_it_was_runs_three(tmp_path: Path) -> None:
    """What the change is measured against; and that this test can see more than one."""
    program = tmp_path / "story.py"
    text = PROGRAM.replace("CALL", "asyncio.to_thread").replace("if i == 0", "if True")
    program.write_text(text.replace("never.wait()", "never.wait(1)"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=90)
    assert done.stdout == "active=3\n"
