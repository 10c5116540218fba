"""Mixed load with faults and reloads, for long: nothing grows, and every call is settled exactly once.

`make soak`, or `python -m soak` in this directory. SOAK_SECONDS says how long (default 1800).

Storms of every kind run side by side against one gateway, again and again; the model server behind it changes its
mind every few seconds about what goes wrong; the configuration is loaded anew. Then all of it stops, and the books
must agree: requests that clients sent, calls in the metrics, lines of the access log, calls begun at the server.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from support.fake import Fake
from support.gateway import Gateway, binary
from support.process import until

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
SLOTS, QUEUE = 40, 40

CONFIG = """
[[upstreams]]
url = "{url}"
slots = {slots}
queue = {queue}
[upstreams.timeouts]
queue = "2s"
first_event = "3s"
silence = "3s"
idle = "3s"
"""

STORMS: dict[str, list[str]] = {
    "cut by RST": ["abort", "--users", "12", "--calls", "240", "--pace", "10ms"],
    "cut by FIN": ["abort", "--users", "8", "--calls", "80", "--pace", "10ms", "--by", "fin"],
    "killed": ["abort", "--users", "8", "--calls", "80", "--pace", "10ms", "--by", "drop"],
    "left early": ["leave-early", "--users", "10", "--calls", "60"],
    "given up": ["abandon", "--users", "8", "--calls", "60"],
    "read": ["steady", "--users", "10", "--tokens", "40", "--pace", "5ms", "--seconds", "5"],
    "crowd": ["burst", "--rate", "30", "--tokens", "20", "--pace", "5ms", "--seconds", "5"],
    "slow": ["slow", "--users", "4", "--seconds", "4"],
    "silent": ["idle", "--users", "4", "--seconds", "2"],
}
# What the server does with calls that do not say otherwise; a storm's own script is put over it.
FAULTS: dict[str, dict[str, object]] = {
    "well": {},
    "cut": {"end": "fin", "end_at": 7},
    "reset": {"end": "rst", "end_at": 7},
    "bad chunk": {"end": "bad_chunk", "end_at": 7},
    "overload": {"status": 503},
    "busy": {"status": 429, "retry_after": "1"},
    "error event": {"error_at": 5},
    "silence": {"stall": {"at": {"event": 6}}},
    "stops late": {"on_close": {"late_ms": 100}},
    "closes idle": {"idle_close_ms": 20},
    "kept ones reset": {"next": "rst"},
    "odd lines": {"line_end": "crlf", "segment": {"size": 7}},
}


def proc(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    value = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    return {
        "memory, KiB": float(value["VmRSS"]),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(value["Threads"]),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares, per minute."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return 60 * sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


class Load:
    """One storm after the other of one kind, until it is asked to end."""

    def __init__(self, name: str, gateway: Gateway, folder: Path):
        self.name, self.gateway, self.file = name, gateway, folder / f"{name}.json"
        self.sent = self.rounds = 0
        self.errors: dict[str, int] = {}
        self.child: subprocess.Popen[bytes] | None = None

    def look(self, again: bool) -> bool:
        """Takes in a storm that is over and starts the next; whether one runs."""
        if self.child and self.child.poll() is None:
            return True
        if self.child:
            self.take()
        if not again:
            return False
        storm = [str(binary()), "storm", *STORMS[self.name], "--target", self.gateway.url, "--quiet"]
        self.child = subprocess.Popen([*storm, "--json", str(self.file)], stdout=subprocess.DEVNULL)
        return True

    def take(self) -> None:
        assert self.child is not None
        code, self.child = self.child.returncode, None
        assert code == 0, f"the storm {self.name!r} ended with {code}"
        (run,) = json.loads(self.file.read_text())["runs"]
        self.rounds += 1
        self.sent += run["report"]["attempts"]
        for kind, n in run["report"]["errors"].items():
            self.errors[kind] = self.errors.get(kind, 0) + n


def books(gateway: Gateway, fake: Fake, sent: int) -> list[str]:
    """Where they do not agree."""
    lines = [line for line in gateway.log().splitlines() if line.startswith("{")]
    calls = [json.loads(line) for line in lines]
    ids = [call["id"] for call in calls]
    truth = httpx.get(f"{fake.url}/__rig/truth").json()
    counts = {
        "requests that clients sent": sent,
        "calls in the metrics": int(gateway.metric("tidegate_calls_total")),
        "lines of the access log": len(lines),
        "ids in the access log": len(set(ids)),
    }
    slots = {
        name: int(gateway.metric(f"tidegate_{name}")) for name in ("admitted_total", "started_total", "ended_total")
    }
    gauges = {name: int(gateway.metric(f"tidegate_{name}")) for name in ("queued", "running", "abandoned", "lingering")}
    print("\n".join(f"{name:28} {n}" for name, n in {**counts, **slots, **gauges}.items()))
    # What was tried and got no head may have ended on its way there: a kept connection that was reset, a client that
    # left while its request was being sent.
    tried = sum(call["attempts"] for call in calls)
    answered = sum("head_ms" in call for call in calls)
    begun = truth["calls_begun"]
    print(f"{'attempts in the access log':28} {tried}, of which {answered} got a head")
    print(f"{'calls begun at the server':28} {begun}, at most {truth['max_running']} at once")
    wrong = []
    if not answered <= begun <= tried:
        wrong.append(f"the two sides differ: {begun} calls begun at the server, {answered} answered of {tried} tried")
    if len(set(counts.values())) != 1:
        wrong.append(f"the books differ: {counts}")
    if slots["started_total"] != slots["ended_total"]:
        wrong.append(f"slots that were not given back: {slots}")
    if any(gauges.values()) or truth["running"]:
        wrong.append(f"something still runs: {gauges}, at the server {truth['running']}")
    if truth["max_running"] > SLOTS + truth["max_unattended"]:
        wrong.append(f"{truth['max_running']} ran at once on {SLOTS} slots")
    return wrong


def grown(samples: list[tuple[float, dict[str, float]]], before: dict[str, float]) -> list[str]:
    """What went up and did not come down."""
    wrong = []
    settled = samples[len(samples) // 4 :]  # the beginning is the allocator's and the pools'
    # A drift that would matter in a day; half an hour sees it through the noise of a load.
    most = {"memory, KiB": 512.0, "descriptors": 5.0, "threads": 0.1}
    for name, bar in most.items():
        points = [(at, sample[name]) for at, sample in settled]
        per_minute = slope(points)
        highest = max(sample[name] for _, sample in samples)
        last = samples[-1][1][name]
        print(
            f"{name:28} {before[name]:.0f} before, {highest:.0f} at most, {last:.0f} last, {per_minute:+.2f} a minute"
        )
        if per_minute > bar * max(1.0, 600 / SECONDS):
            wrong.append(f"{name} grows by {per_minute:.2f} a minute")
    return wrong


def soak(folder: Path) -> list[str]:
    chance = random.Random(7)
    with Fake() as fake, Gateway(config=CONFIG.format(url=fake.url, slots=SLOTS, queue=QUEUE)) as gateway:
        before = proc(gateway.child.pid)
        loads = [Load(name, gateway, folder) for name in STORMS]
        samples: list[tuple[float, dict[str, float]]] = []
        start = time.monotonic()
        reloads, next_fault, next_reload = 0, 0.0, 5.0
        while (at := time.monotonic() - start) < SECONDS:
            for load in loads:
                load.look(again=True)
            if at >= next_fault:
                name = chance.choice(list(FAULTS))
                httpx.put(f"{fake.url}/__rig/script", json=FAULTS[name]).raise_for_status()
                next_fault = at + 3
            if at >= next_reload:
                text = CONFIG.format(url=fake.url, slots=SLOTS, queue=QUEUE + reloads % 2)
                gateway.config_file.write_text(text)
                gateway.reload()
                reloads, next_reload = reloads + 1, at + 10
            samples.append((at, proc(gateway.child.pid)))
            time.sleep(0.5)
        until(lambda: not any([load.look(again=False) for load in loads]), 240, "the last storms are over", every=0.2)
        httpx.put(f"{fake.url}/__rig/script", json={}).raise_for_status()
        gateway.wait_metric(0, "tidegate_running", within=30)
        gateway.wait_metric(0, "tidegate_queued", within=30)
        sent = sum(load.sent for load in loads)
        until(lambda: gateway.metric("tidegate_calls_total") >= sent, 10, f"{sent} calls are settled")
        for load in loads:
            print(f"{load.name:28} {load.rounds} storms, {load.sent} requests, {load.errors or 'no error'}")
        print(f"{'reloads':28} {reloads}")
        wrong = books(gateway, fake, sent) + grown(samples, before)
        after = proc(gateway.child.pid)
        print(f"{'after':28} {after}")
        if gateway.stop() != 0:
            wrong.append("the gateway did not end as asked")
        return wrong


def main() -> int:
    print(f"soaking for {SECONDS:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-soak-") as folder:
        wrong = soak(Path(folder))
    for what in wrong:
        print(f"FAILED {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
