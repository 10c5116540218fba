"""The scripted model server: it fails at any byte as it is told, and counts what really happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx

from support.gateway import binary
from support.process import Server, free_port, until


class Fake(Server):
    def __init__(self):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__("fake", [str(binary()), "fake-upstream", "--listen", f"127.0.0.1:{port}"])

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/__rig/truth").status_code == 200
        except httpx.TransportError:
            return False

    def calls(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/__rig/calls").json()

    def script(self, **fields: object) -> Script:
        """What the server does with one call: put `body` into the request."""
        return Script(self, fields)


class Script:
    def __init__(self, fake: Fake, fields: dict[str, object]):
        self._fake = fake
        self.id = uuid4().hex
        self.body = {"rig": {"id": self.id, **fields}}

    def calls(self) -> list[dict[str, Any]]:
        """Each attempt that reached the server."""
        return [call for call in self._fake.calls() if call["test_id"] == self.id]

    def wait(self, what: str, condition: Callable[[dict[str, Any]], object], within: float = 5) -> dict[str, Any]:
        """The first call that satisfies `condition`."""
        return until(lambda: next(filter(condition, self.calls()), None), within, f"{what}: {self.calls()}", every=0.02)

    def wait_begun(self) -> dict[str, Any]:
        return self.wait("the call arrives", lambda call: call["body_ns"])

    def wait_left(self, within: float = 2) -> dict[str, Any]:
        """The gateway closed its connection and the work stopped with it."""
        return self.wait("the work stops", lambda call: call["ended"] in ("peer_fin", "peer_rst"), within)
