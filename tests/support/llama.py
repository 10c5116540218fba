"""A real llama.cpp server with the tiny model, and what its log says about its work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx

from support.process import CACHE, ROOT, Server, free_port, until

VENV = CACHE / "venv/bin"
MODEL_MAKER = ROOT / "tests/models/tiny.py"

# More than any test lets it write: 20 s of work and more on a busy machine.
ENDLESS = 20_000

LAUNCH = re.compile(r"launch_slot_: id +\d+ \| task (\d+) \| processing task")
RELEASE = re.compile(r"release: id +\d+ \| task (\d+) \| stop processing: n_tokens = (\d+)")


def model_file() -> Path:
    """The model, made again when its maker changed."""
    file = CACHE / "tiny.gguf"
    if not file.exists() or file.stat().st_mtime < MODEL_MAKER.stat().st_mtime:
        subprocess.run([str(VENV / "python"), str(MODEL_MAKER), "--gguf", str(file)], check=True)
    return file


class Llama(Server):
    """The log is what the tests read. Asking `/slots` or `/metrics` wakes the server's queue, and each time that
    happens llama.cpp puts off its look at whether the client of a non-streaming call is still there."""

    def __init__(self, slots: int = 2):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        binary = VENV / "llama-server-vulkan"
        options = f"--alias tiny --host 127.0.0.1 --port {self.port} --metrics --slots --parallel {slots}"
        options += f" --ctx-size {32768 * slots} --device none --no-warmup --embeddings --pooling mean"
        super().__init__("llama", [str(binary), "--model", str(model_file()), *options.split()])

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def work(self) -> Work:
        """What the server does from now on."""
        return Work(self)

    def busy(self) -> int:
        """Slots at work now. To be asked once, not in a loop."""
        return sum(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots").json())


class Work:
    """Tasks that were launched since this was made."""

    def __init__(self, llama: Llama):
        self._llama = llama
        self._before = set(LAUNCH.findall(llama.log()))

    def launched(self) -> list[str]:
        return [task for task in LAUNCH.findall(self._llama.log()) if task not in self._before]

    def released(self) -> dict[str, int]:
        """Tasks that ended → tokens they held then, prompt and answer together."""
        return {task: int(tokens) for task, tokens in RELEASE.findall(self._llama.log()) if task not in self._before}

    def wait_launched(self, count: int = 1, within: float = 10) -> None:
        until(lambda: len(self.launched()) >= count, within, f"llama.cpp starts {count} task(s)")

    def wait_stopped(self, count: int = 1, within: float = 3) -> int:
        """Waits until `count` tasks ended, and returns the tokens of the longest. `ENDLESS` calls do not get
        there by themselves."""
        until(lambda: len(self.released()) >= count, within, f"llama.cpp stops {count} task(s), saw {self.released()}")
        return max(self.released().values())
