"""The units of deploy/: what systemd says of them; the gateway needs nothing they forbid; its sockets outlive it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.fake import Fake
from support.gateway import binary
from support.process import ROOT, Server, free_port, until

SERVICE, SOCKET = ROOT / "deploy/tidegate.service", ROOT / "deploy/tidegate.socket"
INSTALLED = "/usr/local/bin/tidegate"
UNSEEN = {"SystemCallErrorNumber=EPERM": "how a refusal is told, not what is refused"}
"""Lines of the sandbox that have no score."""


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with Fake() as server:
        yield server


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units as they are, but for the place of the program."""
    text = SERVICE.read_text()
    assert INSTALLED in text
    (tmp_path / SERVICE.name).write_text(text.replace(INSTALLED, str(binary())))
    shutil.copy(SOCKET, tmp_path)
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def settings(file: Path) -> dict[str, list[str]]:
    pairs = [line.split("=", 1) for line in file.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)]
    return {name: [value for other, value in pairs if other == name] for name, _ in pairs}


def test_systemd_finds_no_mistake(units: Path):
    done = analyze("verify", str(units / SERVICE.name), str(units / SOCKET.name))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def exposures(file: Path) -> dict[str, float]:
    done = analyze("security", "--offline=yes", "--json=short", str(file))
    return {item["name"]: float(item["exposure"] or 0) for item in json.loads(done.stdout)}


def test_its_exposure_is_low(units: Path):
    done = analyze("security", "--offline=yes", "--threshold=15", str(units / SERVICE.name))
    assert done.returncode == 0, done.stdout
    safe = {name for name, exposure in exposures(units / SERVICE.name).items() if not exposure}
    assert {"ProtectSystem=", "NoNewPrivileges=", "PrivateTmp=", "RestrictSUIDSGID=", "RemoveIPC="} <= safe


def test_each_line_of_the_sandbox_lowers_it(units: Path):
    file = units / SERVICE.name
    rows = file.read_text().splitlines()
    whole = sum(exposures(file).values())
    begin, end = rows.index("DynamicUser=yes"), rows.index("[Install]")
    for number in range(begin, end):
        if "=" in rows[number] and not rows[number].startswith("#") and rows[number] not in UNSEEN:
            file.write_text("\n".join(rows[:number] + rows[number + 1 :]))
            assert sum(exposures(file).values()) > whole, f"{rows[number]} changes nothing"


def members(group: str) -> set[str]:
    done = analyze("syscall-filter", group)
    names = [line.strip() for line in done.stdout.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    return {call for name in names for call in (members(name) if name.startswith("@") else {name})}


def test_it_asks_for_no_system_call_that_the_unit_refuses(fake: Fake, tmp_path: Path):
    """Traced from its start through streams, a client that leaves, a reload and the drain."""
    allowed: set[str] = set()
    for words in settings(SERVICE)["SystemCallFilter"]:
        allowed = allowed - members(words[1:]) if words.startswith("~") else allowed | members(words)
    trace = tmp_path / "trace"
    port, admin = free_port(), free_port()
    config = tmp_path / "tidegate.toml"
    url = fake.url.replace("127.0.0.1", "localhost")
    config.write_text(f'[server]\nlisten = "127.0.0.1:{port}"\n[admin]\nlisten = "127.0.0.1:{admin}"\n')
    config.write_text(config.read_text() + f'[[upstreams]]\nurl = "{url}"\n')
    strace = ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    with Traced(admin, [*strace, str(binary()), "serve", "--config", str(config)]) as traced:
        body = {"model": "m", "stream": True, "messages": []}
        chat = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert "[DONE]" in httpx.post(chat, json=body | fake.script(tokens=3).body).text
        script = fake.script(tokens=10_000, pace_ms=20)
        with httpx.stream("POST", chat, json=body | script.body) as answer:
            next(answer.iter_text())
        script.wait_left()
        assert "tidegate_calls_total" in httpx.get(f"http://127.0.0.1:{admin}/metrics").text
        traced.signal(signal.SIGHUP)
        until(
            lambda: 'reloads_total{result="ok"} 1' in httpx.get(f"http://127.0.0.1:{admin}/metrics").text, 10, "reload"
        )
        traced.signal(signal.SIGTERM)
        until(lambda: traced.child.poll() is not None, 20, "it drains")
    seen = trace.read_text()
    asked = set(re.findall(r"^\d+ +(\w+)\(", seen, re.MULTILINE))
    assert {"accept4", "epoll_wait", "connect", "exit_group"} <= asked, asked
    assert asked <= allowed, asked - allowed
    families = set(re.findall(r"socket\((AF_\w+)", seen))
    assert families <= set(settings(SERVICE)["RestrictAddressFamilies"][0].split()), families
    assert not re.search(r"m(map|protect)\(.*PROT_WRITE\|PROT_EXEC", seen), "MemoryDenyWriteExecute"


class Traced(Server):
    def __init__(self, admin: int, command: list[str]):
        self.admin = f"http://127.0.0.1:{admin}"
        super().__init__("traced", command)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.admin}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        """To the program, the tracer's child."""
        tasks = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children")
        os.kill(int(tasks.read_text().split()[0]), number)


class Activated(Server):
    """The gateway behind `systemd-socket-activate`, which starts it for the first client."""

    def __init__(self, fake: Fake):
        self.ports = free_port(), free_port()
        listens = [word for port in self.ports for word in ("-l", f"127.0.0.1:{port}")]
        serve = [str(binary()), "serve", "--upstream", fake.url]
        super().__init__("activated", ["systemd-socket-activate", *listens, *serve])

    def ready(self) -> bool:
        return "Listening on" in self.log()


def test_a_client_starts_it_through_its_socket(fake: Fake):
    listens = settings(SOCKET)["ListenStream"]
    assert listens == ["127.0.0.1:8080", "127.0.0.1:9090"]
    with Activated(fake) as server:
        data, admin = server.ports
        chat = f"http://127.0.0.1:{data}/v1/chat/completions"
        answer = httpx.post(chat, json={"model": "m", "messages": []} | fake.script(tokens=2).body)
        assert answer.status_code == 200
        assert httpx.get(f"http://127.0.0.1:{admin}/readyz").text == "ready\n"


PASS_ON = """
import os, sys
for number in map(int, sys.argv[1].split(",")):
    os.set_inheritable(number, True)
os.dup2(int(sys.argv[1].split(",")[0]), 3); os.dup2(int(sys.argv[1].split(",")[1]), 4)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_client_that_comes_during_a_restart_waits_for_the_next_process(fake: Fake):
    with socket.create_server(("127.0.0.1", 0)) as data, socket.create_server(("127.0.0.1", 0)) as admin:

        def begin() -> subprocess.Popen[bytes]:
            # High numbers, so that 3 and 4 are free for what systemd passes.
            passed = [os.dup(one.fileno()) for one in (data, admin)]
            serve = [str(binary()), "serve", "--upstream", fake.url]
            command = [sys.executable, "-c", PASS_ON, ",".join(map(str, passed)), *serve]
            return subprocess.Popen(command, pass_fds=passed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        url = "http://{}:{}/v1/models".format(*data.getsockname())
        first = begin()
        try:
            assert httpx.get(url, timeout=10).status_code == 200
            first.send_signal(signal.SIGTERM)
            assert first.wait(10) == 0
            with socket.create_connection(data.getsockname(), timeout=10) as client:
                client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                second = begin()
                try:
                    assert client.recv(1024).startswith(b"HTTP/1.1 200 ")
                finally:
                    second.terminate()
                    second.wait(10)
        finally:
            first.kill()


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|min)?", text).groups()
    return int(number) * (60 if unit == "min" else 1)


def test_systemd_waits_longer_than_a_drain_lasts():
    done = subprocess.run(
        [str(binary()), "check", "--upstream", "http://127.0.0.1:1"], capture_output=True, text=True, check=True
    )
    server = tomllib.loads(done.stdout)["server"]
    longest = seconds(server["drain_lag"]) + seconds(server["drain"]) + 2
    assert seconds(settings(SERVICE)["TimeoutStopSec"][0]) > longest


def test_a_secret_comes_as_a_credential(tmp_path: Path):
    """As the unit's comment says."""
    key = re.search(r'api_key_file = "(.+?)"', SERVICE.read_text()).group(1)
    (tmp_path / "openai").write_text("sk-secret\n")
    config = tmp_path / "tidegate.toml"
    config.write_text(f'[[upstreams]]\nurl = "http://127.0.0.1:1"\napi_key_file = "{key}"\n')
    done = subprocess.run(
        [str(binary()), "check", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CREDENTIALS_DIRECTORY": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "sk-secret" not in done.stdout
