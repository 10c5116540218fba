"""A real vLLM on the CPU, with a small random model, and what it says about its work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

from support.process import CACHE, ROOT, Server, free_port, until

ENDLESS = 8000
ADDED = re.compile(r"Added request (\S+?)\.?$", re.MULTILINE)
ABORTED = re.compile(r"Aborted request\(s\) (\S+?)\.?$", re.MULTILINE)


def model_folder() -> Path:
    """Config and tokenizer; the weights are vLLM's own dummies. Large enough for a prefill that takes a while."""
    folder = CACHE / "tiny-hf"
    maker = ROOT / "tests/models/tiny.py"
    size = ["--hidden", "256", "--layers", "6"]
    subprocess.run([sys.executable, str(maker), "--hf", str(folder), *size], check=True)
    return folder


class Vllm(Server):
    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._next_word = time.monotonic() + 15
        venv = Path(os.environ.get("VLLM_VENV", CACHE / "vllm"))
        options = f"--served-model-name tiny --load-format dummy --dtype float32 --host 127.0.0.1 --port {self.port}"
        options += " --max-model-len 16384 --max-num-seqs 8 --enforce-eager --enable-log-requests"
        print("starting vLLM: one to six minutes, more on a busy machine", file=sys.stderr, flush=True)
        super().__init__(
            "vllm",
            [str(venv / "bin/vllm"), "serve", str(model_folder()), *options.split()],
            env={
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
            boot=1200,
            # Its threads spin between two steps. With two cores every other process, a bare `sleep(0.01)` among them,
            # was seen to wait up to 4 s for one of them while a stream ran; never longer than 17 ms with this.
            spins=True,
        )

    def ready(self) -> bool:
        if time.monotonic() > self._next_word:
            self._next_word += 15
            print("   ", self.tail(1)[:150], file=sys.stderr, flush=True)
        time.sleep(0.5)
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def running(self) -> float:
        return self.metric("vllm:num_requests_running")

    def work(self) -> Work:
        return Work(self)


class Work:
    """Requests that vLLM took since this was made. `finished_reason="abort"` never counts disconnects; the log and
    the number of running requests tell."""

    def __init__(self, vllm: Vllm):
        self._vllm = vllm
        self._before = len(ADDED.findall(vllm.log())), len(ABORTED.findall(vllm.log()))
        self._tokens = vllm.metric("vllm:generation_tokens_total")

    def added(self) -> int:
        return len(ADDED.findall(self._vllm.log())) - self._before[0]

    def aborted(self) -> int:
        return len(ABORTED.findall(self._vllm.log())) - self._before[1]

    def tokens(self) -> int:
        return int(self._vllm.metric("vllm:generation_tokens_total") - self._tokens)

    def wait_added(self, count: int = 1) -> None:
        until(lambda: self.added() >= count, 30, f"vLLM takes {count} request(s)")

    def wait_aborted(self, within: float) -> float:
        """Seconds until the log says that a request was aborted; none runs on after that."""
        begin = time.monotonic()
        until(lambda: self.aborted() >= 1, within, "vLLM aborts the request", every=0.002)
        seconds = time.monotonic() - begin
        until(lambda: self._vllm.running() == 0, within, "vLLM runs nothing", every=0.05)
        return round(seconds, 3)
