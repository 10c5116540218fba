"""curl and browsers' rules: other HTTP versions, `Expect`, cross-origin answers, and exit codes that scripts go by."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from real.clients import PROMPT
from support.fake import Fake
from support.gateway import Gateway

pytestmark = pytest.mark.gateway

CHAT = {"model": "fake", "messages": PROMPT, "max_tokens": 5}
PATH = "/v1/chat/completions"


def curl(url: str, body: dict | None, *flags: str) -> subprocess.CompletedProcess[str]:
    data = [] if body is None else ["--json", "@-"]
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", *flags, *data, url]
    return subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=30, check=False)


VERSIONS = {
    "HTTP/1.1": [],
    "HTTP/1.0": ["--http1.0"],
    "HTTP/2": ["--http2-prior-knowledge"],
    "an offer of HTTP/2 by upgrade": ["--http2"],
}


@pytest.mark.parametrize("version", VERSIONS)
def test_stream(version: str, front: Gateway, fake: Fake):
    body = CHAT | {"stream": True} | fake.script(tokens=5).body
    done = curl(front.url + PATH, body, *VERSIONS[version])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_answer(version: str, front: Gateway, fake: Fake):
    done = curl(front.url + PATH, CHAT | fake.script(tokens=5).body, *VERSIONS[version])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def broken(front: Gateway, fake: Fake, version: str) -> subprocess.CompletedProcess[str]:
    body = CHAT | {"stream": True} | fake.script(tokens=50, pace_ms=20, end="rst", end_at=5).body
    return curl(front.url + PATH, body, *VERSIONS[version])


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_a_broken_stream_fails_the_command(version: str, front: Gateway, fake: Fake):
    assert broken(front, fake, version).returncode in (18, 92), "a partial answer, a stream reset"


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_a_broken_stream_says_why(version: str, front: Gateway, fake: Fake):
    assert '"error"' in broken(front, fake, version).stdout


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_leaving_a_silent_stream(version: str, front: Gateway, fake: Fake):
    """HTTP/2 has no FIN of its own: the stream's reset or the connection's end counts."""
    script = fake.script(tokens=5, stall={"at": {"event": 3}})
    done = curl(front.url + PATH, CHAT | {"stream": True} | script.body, *VERSIONS[version], "--max-time", "1")
    assert done.returncode == 28, "curl's own timeout"
    script.wait_left()


def test_expect_100_continue(front: Gateway, fake: Fake):
    """Without an answer to `Expect` curl would wait for longer than it is given."""
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 2_000_000}]} | fake.script(tokens=1).body
    done = curl(front.url + PATH, body, "--header", "expect: 100-continue", "--expect100-timeout", "60")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"]


def test_head_and_get(front: Gateway):
    assert curl(f"{front.url}/v1/models", None, "--head", "--fail").returncode == 0
    assert curl(f"{front.url}/v1/models", None, "--fail").returncode == 0


def test_a_multipart_upload_passes(front: Gateway, fake: Fake):
    """A route that the gateway does not know: passed on as it is, with the same guarantees."""
    echo = json.dumps({"body": "echo"})
    flags = ["--header", f"x-rig: {echo}", "--form", "file=@-;filename=a.wav", "--form", "model=fake"]
    done = curl(f"{front.url}/v1/audio/transcriptions", None, *flags)
    assert done.returncode == 0, done.stderr
    assert "multipart/form-data" in done.stdout


# --- browsers -----------------------------------------------------------------------------------------------------

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def open_to_browsers(fake: Fake) -> Iterator[Gateway]:
    config = f'[cors]\norigins = ["{ORIGIN}"]\n[[upstreams]]\nurl = "{fake.url}"\n'
    with Gateway(config=config) as gateway:
        yield gateway


PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_preflight(open_to_browsers: Gateway):
    answer = httpx.options(open_to_browsers.url + PATH, headers=PREFLIGHT)
    assert answer.status_code in (200, 204)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed and "content-type" in allowed


def test_the_origin_is_on_every_answer(open_to_browsers: Gateway, fake: Fake):
    """On errors too: without it a page sees only "failed to fetch"."""
    url = open_to_browsers.url + PATH
    for body in (
        CHAT | fake.script(tokens=1).body,
        CHAT | {"stream": True} | fake.script(tokens=1).body,
        CHAT | fake.script(status=429).body,
        {},
    ):
        content = json.dumps(body) if body else "{"
        answer = httpx.post(url, content=content, headers={"origin": ORIGIN, "content-type": "application/json"})
        assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN], answer.status_code
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_another_origin_is_not_let_in(open_to_browsers: Gateway, front: Gateway):
    for gateway, origin in ((open_to_browsers, "https://evil.example"), (front, ORIGIN)):
        answer = httpx.options(gateway.url + PATH, headers=PREFLIGHT | {"origin": origin})
        assert "access-control-allow-origin" not in answer.headers
