"""What fails before the stream fails with its true status, in the shape of the caller's API, and SDKs raise the
exception that their users catch."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import anthropic
import httpx
import openai
import pytest

from real.clients import PROMPT, anthropic_counted, anthropic_error, openai_counted, openai_error
from support.gateway import Gateway
from support.llama import Llama, Work
from support.process import free_port

pytestmark = pytest.mark.gateway

TOO_LONG = [{"role": "user", "content": "word " * 60_000}]


# --- the server says no -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_too_long(stream: bool, gateway: Gateway):
    client, sent = openai_counted(gateway.url)
    with pytest.raises(openai.BadRequestError, match="context size") as refused:
        client.chat.completions.create(model="tiny", messages=TOO_LONG, stream=stream)
    assert refused.value.type == "exceed_context_size_error", "the server's own words pass"
    assert sent.statuses == [400]


def test_prompt_too_long_anthropic(gateway: Gateway):
    client, sent = anthropic_counted(gateway.url)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", messages=TOO_LONG, max_tokens=5)
    assert sent.statuses == [400]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_route(method: str, http: httpx.Client, http_direct: httpx.Client):
    """Passed on: the server may know it."""
    through, plain = (client.request(method, "/v1/nothing") for client in (http, http_direct))
    assert through.status_code == plain.status_code == 404
    assert through.json() == plain.json()


# --- the gateway says no ------------------------------------------------------------------------------------------

CALLS = {
    "/v1/chat/completions": openai_error,
    "/v1/completions": openai_error,
    "/v1/responses": openai_error,
    "/v1/embeddings": openai_error,
    "/v1/messages": anthropic_error,
}
NO_JSON = {
    "cut": b'{"model": "tiny", "messages": [{"role": "us',
    "no object": b'["tiny"]',
    "empty": b"",
    "no UTF-8": b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "trailing": b'{"model": "tiny"} {"model": "tiny"}',
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("body", NO_JSON)
def test_bad_json_is_400(body: str, path: str, http: httpx.Client, work: Work):
    """llama.cpp says 500, which SDKs try three times."""
    answer = http.post(path, content=NO_JSON[body], headers={"content-type": "application/json"})
    assert answer.status_code == 400
    CALLS[path](answer)
    assert not work.launched()


def test_outside_of_the_api(http: httpx.Client):
    """Neither the server's own pages nor the gateway's health and metrics are on this port."""
    for path in ("/", "/slots", "/metrics", "/health", "/healthz", "/props"):
        assert http.get(path).status_code == 404, path


@pytest.fixture(scope="module")
def downed() -> Iterator[Gateway]:
    """A gateway whose model server is not there."""
    with Gateway("--upstream", f"http://127.0.0.1:{free_port()}", "--slots", "2", "--queue", "0") as gateway:
        yield gateway


def test_no_server(downed: Gateway):
    client, sent = openai_counted(downed.url)
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="tiny", messages=PROMPT)
    assert refused.value.status_code in (502, 503)
    assert len(sent.statuses) == 3, "worth trying again"


def test_no_server_anthropic(downed: Gateway):
    client, sent = anthropic_counted(downed.url, max_retries=1)
    with pytest.raises(anthropic.APIStatusError) as refused:
        client.messages.create(model="tiny", messages=PROMPT, max_tokens=5)
    assert refused.value.status_code in (502, 503, 529)
    assert refused.value.body["type"] == "error"
    assert len(sent.statuses) == 2


def test_healthy_without_a_server(downed: Gateway):
    """A gateway whose upstream is down is alive: restarting it would help nobody."""
    assert httpx.get(f"{downed.admin}/healthz").status_code == 200


# --- keys and models ----------------------------------------------------------------------------------------------

GOOD, BAD = "sk-tide-good", "sk-tide-bad"


@pytest.fixture(scope="module")
def locked(llama: Llama) -> Iterator[Gateway]:
    config = f"""
[[keys]]
name = "team"
sha256 = "{sha256(GOOD.encode()).hexdigest()}"

[[upstreams]]
name = "local"
kind = "llama.cpp"
url = "{llama.url}"
models = ["tiny"]
slots = 2
[upstreams.aliases]
small = "tiny"
"""
    with Gateway(config=config) as gateway:
        yield gateway


def test_the_right_key(locked: Gateway):
    client, _ = openai_counted(locked.url, api_key=GOOD)
    assert client.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=2).usage.completion_tokens == 2
    claude, _ = anthropic_counted(locked.url, api_key=GOOD)
    assert claude.messages.create(model="tiny", messages=PROMPT, max_tokens=2).usage.output_tokens == 2


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_both_headers_on_both_apis(path: str, header: str, locked: Gateway):
    value = f"Bearer {GOOD}" if header == "authorization" else GOOD
    body = {"model": "tiny", "messages": PROMPT, "max_tokens": 1}
    assert httpx.post(locked.url + path, json=body, headers={header: value}).status_code == 200


def test_a_wrong_key(locked: Gateway, work: Work):
    client, sent = openai_counted(locked.url, api_key=BAD)
    with pytest.raises(openai.AuthenticationError) as refused:
        client.chat.completions.create(model="tiny", messages=PROMPT)
    assert refused.value.code == "invalid_api_key"
    assert sent.statuses == [401]
    assert BAD not in str(refused.value)

    claude, sent = anthropic_counted(locked.url, api_key=BAD)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        claude.messages.create(model="tiny", messages=PROMPT, max_tokens=5)
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert sent.statuses == [401]
    assert not work.launched()


def test_no_key(locked: Gateway):
    assert httpx.get(f"{locked.url}/v1/models").status_code == 401


def test_an_unknown_model(locked: Gateway, work: Work):
    """llama.cpp itself ignores the name."""
    client, sent = openai_counted(locked.url, api_key=GOOD)
    with pytest.raises(openai.NotFoundError, match="huge") as refused:
        client.chat.completions.create(model="huge", messages=PROMPT)
    assert refused.value.code == "model_not_found"
    assert sent.statuses == [404]

    claude, sent = anthropic_counted(locked.url, api_key=GOOD)
    with pytest.raises(anthropic.NotFoundError, match="huge") as refused:
        claude.messages.create(model="huge", messages=PROMPT, max_tokens=5)
    assert refused.value.body["error"]["type"] == "not_found_error"
    assert sent.statuses == [404]
    assert not work.launched()


def test_an_alias(locked: Gateway):
    client, _ = openai_counted(locked.url, api_key=GOOD)
    answer = client.chat.completions.create(model="small", messages=PROMPT, max_tokens=2)
    assert answer.usage.completion_tokens == 2
    assert {"tiny", "small"} <= {model.id for model in client.models.list()}
