"""`tidegate probe` on a real llama.cpp, and on what is no model server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from support.gateway import Gateway, binary, direct
from support.llama import Llama
from support.process import CACHE, free_port

pytestmark = pytest.mark.skipif(direct(), reason="the probe is the gateway's")


def probe(url: str, *options: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    if key:
        env["TIDEGATE_API_KEY"] = key
    command = [str(binary()), "probe", url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=env)


def probed(llama: Llama, expected: dict[str, tuple[str, ...]], *options: str) -> tuple[dict, dict[str, str]]:
    """What the probe finds, and its verdicts. A machine that stands still makes a server look late: it is asked again,
    three times in all, if the verdicts are not among the expected ones."""
    for _ in range(3):
        run = probe(llama.url, "--json", "--tokens", "1000000", *options)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        verdicts = {finding["id"]: finding["verdict"] for finding in found["findings"]}
        if all(verdicts[name] in allowed for name, allowed in expected.items()):
            break
    return found, verdicts


@pytest.mark.timeout(900)  # it waits for idle limits and for whole answers beside traffic
def test_llama_cpp(llama: Llama):
    expected = {"stream": ("stops",), "whole": ("stops_late",), "whole_beside": ("runs_on",)}
    found, verdicts = probed(llama, expected | {"prefill": ("stops", "stops_late")})
    assert (found["kind"], found["calls_at_once"]) == ("llama.cpp", 2)
    assert verdicts["stream"] == "stops"
    assert verdicts["whole"] == "stops_late", "a look each second, when nothing else goes on"
    assert verdicts["whole_beside"] == "runs_on", "and none while anything does"
    assert verdicts["prefill"] in ("stops", "stops_late"), "with the batch that runs"
    assert verdicts["queued"] == "launched"
    assert verdicts["queue"] == "no_bound_seen"
    assert verdicts["usage"] == "at_the_end"
    assert verdicts["idle"] == "closes"
    assert found["confirm"] == "llama-slots"
    assert '# abandon.confirm = "llama-slots"' in found["config"]
    for line in ('kind = "llama.cpp"', "slots = 2", 'on_abandon = "cancel"', "ask_stream = true"):
        assert line in found["config"]
    # What it leads to is what the gateway takes, and the gateway runs with it.
    file = CACHE / "probed.toml"
    file.write_text(found["config"].replace("# abandon.confirm", "abandon.confirm"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    command = [str(binary()), "check", "--config", str(file)]
    check = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert check.returncode == 0, check.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("route", ["completions", "messages", "responses"])
def test_llama_cpp_by_another_api(route: str, llama: Llama):
    found, verdicts = probed(llama, {"stream": ("stops",), "whole": ("stops_late",)}, "--quick", "--route", route)
    assert (found["kind"], found["route"]) == ("llama.cpp", f"/v1/{route}")
    assert found["confirm"] == "llama-slots"
    assert verdicts["stream"] == "stops"
    assert verdicts["whole"] == "stops_late", "a look each second, when nothing else goes on"
    assert verdicts["usage"] == "at_the_end"


class Page(BaseHTTPRequestHandler):
    status, text, kind = 404, "<html>not here</html>", "text/html"
    refusal: tuple[int, str] | None = None
    """What a POST gets, if it is not the page: a status, and the message of its error."""

    def do_GET(self) -> None:  # noqa: N802
        self.answer(self.status, self.text)

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["content-length"]))
        status, message = self.refusal or (self.status, self.text)
        self.answer(status, json.dumps({"error": {"message": message}}))

    def answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-type", self.kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def page() -> Iterator[type[Page]]:
    """A web server that answers everything with one page; its fields say which."""

    class Mine(Page):
        pass

    server = HTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Mine.url = f"http://127.0.0.1:{server.server_port}"
    yield Mine
    server.shutdown()
    thread.join()


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (404, "<html>not here</html>", "there is no model server at"),
        (200, "<html>hello</html>", "not with a list of models"),
        (200, '{"data": []}', "has no model"),
        (200, '{"data": [{"id": "a"}, {"id": "b"}]}', "choose one with --model, such as a, b"),
        (401, '{"error": {"message": "who are you"}}', "wants a key"),
        (429, '{"error": {"message": "slow down"}}', "limits our rate"),
        (503, "loading", "has an error of its own"),
    ],
)
def test_what_is_no_server_to_probe(status: int, text: str, says: str, page: type[Page]):
    page.status, page.text = status, text
    run = probe(page.url)
    assert (run.returncode, run.stdout) == (1, "")
    assert says in run.stderr, run.stderr


def test_a_wrong_key_is_told_and_not_shown(page: type[Page]):
    page.status, page.text = 403, '{"error": {"message": "no"}}'
    run = probe(page.url, key="sk-MARKER")
    assert run.returncode == 1
    assert "does not take the key" in run.stderr
    assert "MARKER" not in run.stderr + run.stdout


def test_nobody_there():
    run = probe(f"http://127.0.0.1:{free_port()}")
    assert run.returncode == 1
    assert "nothing listens there" in run.stderr


def test_no_name():
    run = probe("http://no-such-host.invalid")
    assert run.returncode == 1
    assert "cannot be resolved" in run.stderr


def test_no_tls(page: type[Page]):
    run = probe(page.url.replace("http:", "https:"))
    assert run.returncode == 1
    assert "the TLS handshake failed" in run.stderr


def test_no_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    peer.recv(65536)
                    peer.sendall(b"SSH-2.0-OpenSSH\r\n")
                    peer.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        run = probe(f"http://127.0.0.1:{port}")
    assert run.returncode == 1
    assert "not HTTP" in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ((404, "the model `huge` does not exist"), "does not answer /v1/chat/completions for the model `huge`"),
        ((429, "slow down"), "limits our rate"),
        ((400, "no such field"), "refuses a plain call of /v1/chat/completions: 400: no such field"),
        ((200, "hello"), "does not stream"),
    ],
)
def test_a_model_that_does_not_answer(refusal: tuple[int, str], says: str, page: type[Page]):
    page.status, page.text = 200, '{"data": [{"id": "huge"}]}'
    page.refusal = refusal
    run = probe(page.url)
    assert (run.returncode, run.stdout) == (1, "")
    assert says in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["ftp://x"], "neither http:// nor https://"),
        (["http://x", "--at-once", "0"], "1..=64"),
        (["http://x", "--api-key-file", "/no/such/file"], "cannot be read"),
        (["http://x", "--api-key", "sk-1"], "--api-key"),
        ([], "URL"),
    ],
)
def test_a_wrong_command_line(options: list[str], says: str):
    run = subprocess.run([str(binary()), "probe", *options], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert says in run.stderr, run.stderr


def test_the_plan_costs_nothing(front: Gateway):
    run = probe(front.url, "--plan", "--quick")
    assert run.returncode == 0
    assert "generated tokens" in run.stdout
