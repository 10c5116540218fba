"""Measures what docs/operations.md says of the kernel: `make measure`. Root, for network namespaces; two minutes."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from shipped.checks import Scene
from support.fake import Fake, Script
from support.gateway import Gateway, binary
from support.https import Broken
from support.process import CACHE, Server, free_port, until
from support.shipped import shipped

STILL = {"at": {"event": 1}}
PASS_ON = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.argv[2], sys.argv[2:])
"""
VANISHING = """
import socket, sys
with socket.create_connection((sys.argv[1], 18080)) as client:
    client.sendall(sys.argv[2].encode())
    while client.recv(65536):
        pass
"""


def answers(admin: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{admin}/readyz").status_code == 200
    return False


class Program(Server):
    """The gateway, started by this command."""

    def __init__(self, command: list[str], admin: int):
        self.admin = f"http://127.0.0.1:{admin}"
        super().__init__("measured", command)

    def ready(self) -> bool:
        return answers(self.admin)


def request(script: Script) -> bytes:
    body = json.dumps({"model": "m", "stream": True, "messages": []} | script.body)
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )


def overflows() -> int:
    names, values = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines()[:2]]
    return int(values[names.index("ListenOverflows")])


def backlog(fake: Fake, pending: int, burst: int = 1000) -> str:
    """A burst of connections to a socket whose backlog is that long."""
    with socket.socket() as listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(pending)
        listener.set_inheritable(True)
        admin = free_port()
        serve = [str(binary()), "serve", "--upstream", fake.url, "--admin", f"127.0.0.1:{admin}"]
        command = [sys.executable, "-c", PASS_ON, str(listener.fileno()), *serve]
        passed = [listener.fileno()]
        program = subprocess.Popen(command, pass_fds=passed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(program.wait)
        stack.callback(program.kill)
        until(lambda: answers(f"http://127.0.0.1:{admin}"), 20, "the gateway is ready")
        before, begun, took = overflows(), {}, []
        for _ in range(burst):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            begun[client] = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                client.connect(listener.getsockname())
            selector.register(client, selectors.EVENT_WRITE)
        while begun:
            for key, _ in selector.select(1):
                took.append(time.monotonic() - begun.pop(key.fileobj))
                selector.unregister(key.fileobj)
        late = sum(seconds > 0.9 for seconds in took)
        return f"backlog {pending}: {late} of {burst} late, {overflows() - before} overflows, slowest {max(took):.2f} s"


def descriptors(fake: Fake, streams: int = 200) -> str:
    with Gateway("--upstream", fake.url, "--slots", "400") as gateway, contextlib.ExitStack() as stack:
        folder = Path(f"/proc/{gateway.child.pid}/fd")
        before = len(list(folder.iterdir()))
        for _ in range(streams):
            port = int(gateway.url.rpartition(":")[2])
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(request(fake.script(stall=STILL)))
            client.recv(10)
        during = len(list(folder.iterdir()))
        stack.close()
        gateway.wait_metric(0, "tidegate_running")
        command = f"ss -Htn state time-wait dport = :{fake.url.rpartition(':')[2]}"
        waiting = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout.count("\n")
        return (
            f"{streams} streams: {before} descriptors before, {during} with them; {waiting} in TIME_WAIT when cancelled"
        )


def keep_alive(fake: Fake, time_out: str, users: int = 20, calls: int = 25) -> str:
    """Users behind nginx who call once a second."""
    scene, failed = Scene("nginx", shipped("nginx"), fake), []
    with scene.stack:
        edge = scene.edge(scene.gateway(server=f'keep_alive = "{time_out}"'))

        def user(number: int) -> None:
            for _ in range(calls):
                with contextlib.suppress(Broken):
                    with edge.call("HTTP/1.1", b'{"model":"m","messages":[],"max_tokens":1}') as answer:
                        status = answer.head().status
                        answer.body()
                    if status != 200:
                        failed.append(status)
                time.sleep(1 - (number - users / 2) / 2000)

        threads = [threading.Thread(target=user, args=(number,)) for number in range(users)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return f"keep_alive {time_out}: {len(failed)} of {users * calls} failed {set(failed) or ''}"


def vanish(fake: Fake, name: str, server: str, longest: float = 60, **script) -> str:
    """A client whose network is taken away: how long its call holds its slot."""

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    inner = "netns exec tidegate ip"
    ip("netns add tidegate")
    try:
        ip("link add tidegate0 type veth peer name inside netns tidegate")
        ip("addr add 10.199.0.1/24 dev tidegate0")
        ip("link set tidegate0 up")
        ip(f"{inner} addr add 10.199.0.2/24 dev inside")
        ip(f"{inner} link set inside up")
        admin, config = free_port(), CACHE / "vanish.toml"
        listen = f'[server]\nlisten = "10.199.0.1:18080"\nallow_unauthenticated = true\n{server}\n'
        config.write_text(f'{listen}[admin]\nlisten = "127.0.0.1:{admin}"\n[[upstreams]]\nurl = "{fake.url}"\n')
        with Program([str(binary()), "serve", "--config", str(config)], admin):
            work = fake.script(**script)
            words = [sys.executable, "-c", VANISHING, "10.199.0.1", request(work).decode()]
            client = subprocess.Popen(["ip", "netns", "exec", "tidegate", *words])
            work.wait_begun()
            time.sleep(1)
            ip(f"{inner} link set inside down")
            begin = time.monotonic()
            try:
                work.wait_left(within=longest)
                held = f"{time.monotonic() - begin:.1f} s"
            except AssertionError:
                held = f"more than {longest:.0f} s"
            client.kill()
            client.wait()
        return f"vanished {name}, {server or 'defaults'}: {held}"
    finally:
        # The link too: its end in the namespace goes some time after the namespace's name.
        subprocess.run(["ip", "link", "del", "tidegate0"], check=False)
        ip("netns del tidegate")


def main() -> None:
    with Fake() as fake:
        print(descriptors(fake))
        for _ in range(3):
            for pending in (16, 128, 4096):
                print(backlog(fake, pending), flush=True)
        for time_out in ("1s", "75s"):
            print(keep_alive(fake, time_out), flush=True)
        endless = {"tokens": 100_000, "pace_ms": 50}
        print(vanish(fake, "while it waited", "", stall={"at": "head"}), flush=True)
        print(vanish(fake, "in mid-stream", "", **endless), flush=True)
        print(vanish(fake, "in mid-stream", 'tcp_user_timeout = "10s"', **endless), flush=True)
        print(vanish(fake, "in mid-stream", 'tcp_user_timeout = "1h"\ntcp_keep_alive = "9h"', **endless), flush=True)


if __name__ == "__main__":
    main()
