"""nginx, HAProxy and Caddy, started with the files of deploy/ as they are shipped.

What is changed in a file are the addresses and paths of `PLACES`, each of which must stand in it; and where the program
would use the machine's own folders, lines are put in that name others (`Kind.more`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from support.https import VERSIONS, Answer, certificate
from support.process import ROOT, Server, free_port, until

PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
GATEWAY = "127.0.0.1:8080"
CORES = os.cpu_count() or 1
AS_AT_LOGIN = ["sh", "-c", 'ulimit -Sn 1024 && exec "$@"', "sh"]
"""The descriptors that a program gets which does not ask for more."""


def named(program: str) -> str:
    found = shutil.which(program, path=PATH)
    assert found, f"{program} is not installed: run tests/setup.sh"
    return found


TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Kind:
    """A program and its file. In commands, places and lines {words} stand for `Edge.values`."""

    file: str
    program: str
    command: str
    reload: str
    places: dict[str, str]
    """What stands in the file → what the test puts there."""
    up: str = ""
    """Its log says so when it hears signals."""
    more: tuple[str, str] = ("", "")
    """After the first of these the second is put in."""
    env: dict[str, str] = field(default_factory=dict)


KINDS = {
    "nginx": Kind(
        "nginx.conf",
        "nginx",
        "nginx -e stderr -p {folder} -c {file} -g 'daemon off; pid {folder}/nginx.pid;'",
        "kill -HUP {pid}",
        {
            GATEWAY: "{gateway}",
            "listen 443": "listen 127.0.0.1:{port}",
            "/etc/nginx/tidegate.crt": "{crt}",
            "/etc/nginx/tidegate.key": "{key}",
        },
        more=(
            "http {\n",
            "".join(f"{kind}_temp_path {{folder}}/{kind};\n" for kind in TEMPORARY),
        ),
    ),
    "HAProxy": Kind(
        "haproxy.cfg",
        "haproxy",
        "haproxy -W -db -dW -f {file}",
        "kill -USR2 {pid}",
        {
            GATEWAY: "{gateway}",
            "port 9090": "port {admin}",
            "bind :443": "bind 127.0.0.1:{port}",
            "/etc/haproxy/tidegate.pem": "{pem}",
        },
        up="Loading success",
    ),
    "Caddy": Kind(
        "Caddyfile",
        "caddy",
        "caddy run --adapter caddyfile --config {file}",
        "caddy reload --adapter caddyfile --force --config {file}",
        {
            GATEWAY: "{gateway}",
            "health_port 9090": "health_port {admin}",
            "\n:443 {": "\nhttps://localhost:{port} {{\n\tbind 127.0.0.1",
            "/etc/caddy/tidegate.crt /etc/caddy/tidegate.key": "{crt} {key}",
        },
        more=("\n{\n", "\tadmin 127.0.0.1:{extra}\n\tauto_https disable_redirects\n"),
        env={"HOME": "{folder}", "XDG_CONFIG_HOME": "{folder}", "XDG_DATA_HOME": "{folder}"},
    ),
}


def shipped(kind: str) -> str:
    return (ROOT / "deploy" / KINDS[kind].file).read_text()


class Edge(Server):
    """One program in front of one gateway. `text` is the file's, shipped or altered."""

    def __init__(self, kind: str, text: str, gateway: str, admin: str = "127.0.0.1:1"):
        self.kind = KINDS[kind]
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-edge-"))
        self.folder.chmod(0o755)  # nginx runs as a user of its own
        self.port = free_port()
        key, self.crt = certificate(self.folder)
        pem = self.folder / "tls.pem"
        pem.write_text(self.crt.read_text() + key.read_text())
        self.values = {
            "folder": self.folder,
            "gateway": gateway,
            "admin": admin.rpartition(":")[2],
            "port": self.port,
            "extra": free_port(),
            "crt": self.crt,
            "key": key,
            "pem": pem,
        }
        for place, value in self.kind.places.items():
            text = text.replace(place, value.format(**self.values))
        after, more = self.kind.more
        text = text.replace(after, after + more.format(**self.values), 1) if after else text
        self.file = self.folder / self.kind.file
        self.file.write_text(text)
        self.values |= {"file": self.file}
        command = self._words(self.kind.command)
        env = {name: value.format(**self.values) for name, value in self.kind.env.items()}
        try:
            super().__init__(self.kind.program, [*AS_AT_LOGIN, *command], env=env)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _words(self, command: str) -> list[str]:
        program, *rest = shlex.split(command.format(**self.values))
        return [named(program), *rest]

    def ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        if self.kind.program == "nginx" and len(self._serving(set(self.processes()))) < self._workers():
            return False  # its port takes connections before it has made its workers
        return self.kind.up in self.log()

    def _workers(self) -> int:
        """That nginx is told to make."""
        told = re.search(r"^worker_processes (\w+);", self.file.read_text(), re.MULTILINE)
        return CORES if told and told[1] == "auto" else int(told[1]) if told else 1

    def call(
        self,
        version: str,
        body: bytes,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Sends a request; its answer has not been read yet."""
        given = {"content-type": "application/json", "content-length": str(len(body))} if body else {}
        return VERSIONS[version](self.port, self.crt, method, path, body, given | (headers or {}))

    def processes(self) -> list[int]:
        """Of the program: the one that was started, and its children."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getpgid(int(entry.name)) == self.child.pid:
                        found.append(int(entry.name))
                except (ProcessLookupError, PermissionError):
                    continue
        return sorted(found)

    def reload(self) -> None:
        """Returns when new processes serve, or, with Caddy, the new configuration does."""
        before = set(self.processes())
        self.values |= {"pid": self.child.pid}
        command = self._words(self.kind.reload)
        env = {name: value.format(**self.values) for name, value in self.kind.env.items()}
        subprocess.run(command, check=True, capture_output=True, timeout=20, env=os.environ | env)
        if "kill" in self.kind.reload:
            until(lambda: set(self.processes()) - before, 10, "a new process serves after the reload")
        if self.kind.program == "nginx":
            # An old process may still take a connection, and closes it as an idle one when it hears that it is old.
            until(lambda: not self._serving(before - {self.child.pid}), 10, "the old processes know that they are old")

    @staticmethod
    def _serving(workers: set[int]) -> list[int]:
        """Those that have set themselves up, limits included: nginx gives a worker its title after that."""

        def title(worker: int) -> str:
            try:
                return Path(f"/proc/{worker}/cmdline").read_text()
            except OSError:
                return "gone"

        return [worker for worker in workers if title(worker).startswith("nginx: worker process\0")]

    def stop(self, grace: float = 0.2) -> int:
        """Streams that are left need not end: nobody reads them."""
        code = super().stop(grace)
        shutil.rmtree(self.folder, ignore_errors=True)
        return code
