"""Stopping and reloading under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from real.clients import PROMPT, events, last_json
from support.fake import Fake, Script
from support.gateway import Gateway
from support.process import until

pytestmark = pytest.mark.gateway

CHAT = {"model": "fake", "messages": PROMPT, "max_tokens": 50}


@contextmanager
def gateway(fake: Fake, drain: str, more: str = "") -> Iterator[Gateway]:
    config = f"""
[server]
drain = "{drain}"
[[upstreams]]
name = "one"
url = "{fake.url}"
{more}
"""
    with Gateway(config=config) as server:
        yield server


class Reader(threading.Thread):
    """Reads a stream to its end, whichever that is."""

    def __init__(self, server: Gateway, script: Script, path: str = "/v1/chat/completions"):
        super().__init__()
        self.text = ""
        self.proper = False
        self._url = server.url + path
        self._body = CHAT | {"stream": True} | script.body
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=30) as answer:
                for piece in answer.iter_text():
                    self.text += piece
            self.proper = True
        except httpx.TransportError:
            pass

    def wait_text(self) -> None:
        until(lambda: self.text, 5, "the stream begins")


def is_closed(server: Gateway) -> bool:
    try:
        httpx.get(f"{server.url}/v1/models")
    except httpx.TransportError:
        return True
    return False


def test_a_stream_finishes_after_sigterm(fake: Fake):
    with gateway(fake, drain="20s") as server:
        reader = Reader(server, fake.script(tokens=100, pace_ms=40))
        reader.wait_text()
        server.terminate()
        until(lambda: not server.ready(), 10, "readiness says no")
        until(lambda: is_closed(server), 10, "no new connection is taken")
        reader.join()
        assert reader.proper and "[DONE]" in reader.text
        assert server.child.wait(5) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_at_the_deadline_a_stream_ends_with_an_error(path: str, fake: Fake):
    with gateway(fake, drain="1s") as server:
        script = fake.script(tokens=10_000, pace_ms=20)
        reader = Reader(server, script, path)
        reader.wait_text()
        server.terminate()
        reader.join()
        script.wait_left()
        assert not reader.proper
        assert last_json(reader.text)["error"]["message"]
        if path == "/v1/messages":
            assert events(reader.text)[-1][0] == "error"
        server.child.wait(5)


def test_a_second_signal_ends_at_once(fake: Fake):
    with gateway(fake, drain="60s") as server:
        script = fake.script(tokens=10_000, pace_ms=20)
        reader = Reader(server, script)
        reader.wait_text()
        server.terminate()
        until(lambda: not server.ready(), 10, "readiness says no")
        server.terminate()
        server.child.wait(3)
        reader.join()
        assert not reader.proper
        script.wait_left()


def test_idle_means_gone_at_once(fake: Fake):
    with gateway(fake, drain="60s") as server:
        with httpx.Client() as idle:
            idle.post(f"{server.url}/v1/chat/completions", json=CHAT | fake.script(tokens=1).body)
            begin = time.monotonic()
            server.terminate()
            assert server.child.wait(5) == 0
            assert time.monotonic() - begin < 2, "an idle keep-alive connection holds nothing up"


def generation(server: Gateway) -> float:
    return server.metric("tidegate_config_generation")


def by_signal(server: Gateway) -> None:
    server.reload()


def by_itself(server: Gateway) -> None:
    """A change of the file is enough."""


@pytest.mark.parametrize("trigger", [by_signal, by_itself])
def test_reload(trigger: Callable, fake: Fake):
    """A running call keeps going, the next one finds the new settings."""
    with gateway(fake, drain="1s", more='models = ["fake"]') as server:
        reader = Reader(server, fake.script(tokens=60, pace_ms=40))
        reader.wait_text()
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | {"model": "new"}).status_code == 404
        text = server.config_file.read_text()
        server.config_file.write_text(text.replace('models = ["fake"]', 'models = ["fake", "new"]'))
        trigger(server)
        until(lambda: generation(server) >= 2, 10, "the new configuration runs")
        body = CHAT | {"model": "new"} | fake.script(tokens=1).body
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
        reader.join()
        assert reader.proper and "[DONE]" in reader.text


def test_a_bad_file_changes_nothing_and_says_why(fake: Fake):
    with gateway(fake, drain="1s") as server:
        server.config_file.write_text('[[upstreams]]\nurll = "http://127.0.0.1:1"\n')
        server.reload()
        until(lambda: "urll" in server.log(), 5, "the log names the mistake")
        assert generation(server) == 1
        body = CHAT | fake.script(tokens=1).body
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
