"""Tidegate as its users start it: one process, flags or a file, health and metrics on a port of their own."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.process import CACHE, ROOT, Server, free_port, until


def binary() -> Path:
    """`TIDEGATE_BIN`, else the release build, else the debug build."""
    named = os.environ.get("TIDEGATE_BIN")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    choices = [Path(named)] if named else [target / profile / "tidegate" for profile in ("release", "debug")]
    for choice in choices:
        if choice.exists():
            return choice.absolute()
    raise AssertionError(f"no gateway at {' or '.join(map(str, choices))}: run `cargo build --release` first")


def direct() -> bool:
    """Whether the tests run without a gateway, to see what the servers do by themselves."""
    return os.environ.get("TIDEGATE_BIN") == "direct"


@dataclass
class Direct:
    """Stands in for the gateway when the tests talk to the server itself."""

    url: str

    def stop(self) -> None: ...

    def tail(self, lines: int = 40) -> str:
        return "(no gateway: TIDEGATE_BIN=direct)"


class Gateway(Server):
    """`Gateway("--upstream", url)` or `Gateway(config='[[upstreams]] …')`. Listen addresses are filled in."""

    def __init__(self, *flags: str, config: str | None = None, env: dict[str, str] | None = None):
        port, admin = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin}"
        command = [str(binary()), "serve", "--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
        if config is not None:
            self.config_file = CACHE / f"tidegate-{port}.toml"
            self.config_file.write_text(config)
            command += ["--config", str(self.config_file)]
        super().__init__("tidegate", [*command, *flags], env=env)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.admin}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def access(self, request_id: str) -> dict[str, Any]:
        """The access-log line of one call. Each call has exactly one, written when its work has ended."""

        def lines() -> list[dict[str, Any]]:
            found = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
            return [line for line in found if line.get("id") == request_id]

        until(lines, 5, f"an access-log line of {request_id}")
        (line,) = lines()
        return line

    def reload(self) -> None:
        self.child.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        self.child.send_signal(signal.SIGTERM)

    def metrics(self) -> dict[str, float]:
        """`name{labels}` → value."""
        text = httpx.get(f"{self.admin}/metrics").text
        return {key: float(value) for key, value in re.findall(r"^([a-z]\S*(?:\{.*\})?) (\S+)", text, re.MULTILINE)}

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry `labels`."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in wanted)
        )

    def wait_metric(self, value: float, name: str, within: float = 5, **labels: str) -> None:
        until(lambda: self.metric(name, **labels) == value, within, f"{name}{labels} is {value}")
