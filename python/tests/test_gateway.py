"""A call's number goes to the gateway with its requests, and the gateway is told when the call is left."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import boto3
import botocore.auth
import botocore.awsrequest
import botocore.config
import botocore.credentials
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3
from server import Server, serving, until
from work import idle, reads

import tidegate

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def number_in(head: bytes) -> str:
    found = re.search(rb"(?i)x-tidegate-call: ([A-Za-z0-9_.:-]{1,64})\r?\n?", head + b"\r\n")
    return found[1].decode() if found else ""


def boto(url: str) -> Any:
    """Bedrock behind the gateway, whose other paths it passes on."""
    client = boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=botocore.config.Config(read_timeout=60),
    )
    return client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "hi"}]}])


KEY = {"authorization": "Bearer mine"}
BODY = {"model": "m", "messages": MESSAGES}
CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": lambda url: openai.OpenAI(base_url=url + "/v1", api_key="mine").chat.completions.create(
        model="m", messages=MESSAGES
    ),
    "anthropic": lambda url: anthropic.Anthropic(base_url=url, api_key="mine").messages.create(
        model="m", max_tokens=5, messages=MESSAGES
    ),
    "httpx": lambda url: httpx.post(url + "/v1/chat/completions", json=BODY, headers=KEY, timeout=60),
    "httpx2": lambda url: httpx2.post(url + "/v1/chat/completions", json=BODY, headers=KEY, timeout=60),
    "requests": lambda url: requests.post(url + "/v1/chat/completions", json=BODY, headers=KEY, timeout=60),
    "urllib3": lambda url: urllib3.PoolManager().request(
        "POST", url + "/v1/chat/completions", json=BODY, headers={"Authorization": "Bearer mine"}, timeout=60
    ),
    "boto3": lambda url: boto(url + "/v1"),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_the_gateway_is_told(client: str) -> None:
    with serving("hang", "answer") as gateway:
        limiter = tidegate.Limiter(1, gateway=gateway.url + "/v1")
        call = limiter.submit(CLIENTS[client], gateway.url)
        until(lambda: len(gateway.requests) == 1)
        number = number_in(gateway.requests[0])
        assert number
        call.cancel()
        until(lambda: len(gateway.requests) == 2)
        told = gateway.requests[1]
        assert told.startswith(f"POST /v1/calls/{number}/cancel HTTP/1.1".encode())
        key = b"aws4-hmac-sha256 " if client == "boto3" else b"bearer mine"
        assert b"\r\nauthorization: " + key in told.lower()
        until(call.done)
        idle(limiter)


def test_a_gateway_under_a_path_is_told_there() -> None:
    with serving("hang", "answer") as gateway:
        limiter = tidegate.Limiter(1, gateway=gateway.url + "/models/v1/")
        call = limiter.submit(httpx.post, gateway.url + "/models/v1/x", timeout=60)
        until(lambda: len(gateway.requests) == 1)
        call.cancel()
        until(lambda: len(gateway.requests) == 2)
        assert gateway.requests[1].startswith(b"POST /models/v1/calls/")
        until(call.done)


def test_a_signed_request_stays_signed_and_headers_of_a_caller_stay_the_callers() -> None:
    with serving("answer") as gateway:
        limiter = tidegate.Limiter(1, gateway=gateway.url)
        limiter.submit(boto, gateway.url).result(20)
        (head,) = gateway.requests
        lines = [line.split(b": ", 1) for line in head.decode().encode().split(b"\r\n")[1:]]
        given = {name.decode().lower(): value.decode() for name, value in lines}
        found = re.search(r"SignedHeaders=([^,]*), Signature=([0-9a-f]{64})", given["authorization"])
        assert found and number_in(head) and tidegate._gateway.HEADER not in found[1]
        signed = {name: given[name] for name in found[1].split(";")}
        body = b'{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}'
        request = botocore.awsrequest.AWSRequest("POST", gateway.url + head.split()[1].decode(), signed, body)
        request.context["timestamp"] = given["x-amz-date"]
        credentials = botocore.credentials.Credentials("a", "b")
        auth = botocore.auth.SigV4Auth(credentials, "bedrock", "us-east-1")
        text = auth.string_to_sign(request, auth.canonical_request(request))
        assert auth.signature(text, request) == found[2]

        shared = {"X-Mine": "1"}
        limiter.submit(urllib3.PoolManager().request, "GET", gateway.url, headers=shared).result(20)
        assert number_in(gateway.requests[1]) and shared == {"X-Mine": "1"}


def test_nobody_else_is_told() -> None:
    """Another server than the gateway, a limiter without one, a call that is not left, severing turned off."""
    with serving("answer") as gateway, serving("hang") as other:
        limiter = tidegate.Limiter(1, gateway=gateway.url)
        assert limiter.submit(httpx.get, gateway.url).result(10).status_code == 200
        assert number_in(gateway.requests[0])
        left = limiter.submit(httpx.get, other.url, timeout=60)
        until(lambda: other.active)
        left.cancel()
        until(left.done)
        without = tidegate.Limiter(1)
        assert without.submit(httpx.get, gateway.url).result(10).status_code == 200
        httpx.get(gateway.url)
        assert [bool(number_in(head)) for head in [*gateway.requests, *other.requests]] == [True, False, False, False]
        assert len(gateway.requests) == 3
        idle(limiter)


def test_a_gateway_that_is_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving("hang") as gateway:
        limiter = tidegate.Limiter(1, gateway=gateway.url)
        call = limiter.submit(httpx.get, gateway.url, timeout=60)
        until(lambda: gateway.active)
        gateway.close()
        call.cancel()
        until(call.done)
        until(lambda: "could not be told to cancel" in caplog.text)


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://", 5])
def test_a_gateway_that_is_none(url: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="gateway must be a URL"):
        tidegate.Limiter(1, gateway=url)


def test_the_wheel_brings_the_gateway() -> None:
    program = Path(sys.executable).parent / "tidegate"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, f"tidegate {_version()}\n")
    file = program.read_bytes()[:4]
    assert file == b"\x7fELF", "the program itself, and no script around it"


def _version() -> str:
    from importlib.metadata import version

    return version("tidegate")


class Relay:
    """Stands between: a client that closes its connection leaves the one behind it open."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._kept: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                behind = socket.create_connection(("127.0.0.1", self._behind))
                self._kept.append(behind)
                for pair in ((client, behind), (behind, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)

    def close(self) -> None:
        for one in (self._listener, *self._kept):
            one.close()


@contextlib.contextmanager
def real_gateway(model: Server, log: Path) -> Iterator[int]:
    """The gateway of the wheel before a model server; its port."""
    program = Path(sys.executable).parent / "tidegate"
    upstream = f"http://127.0.0.1:{model.port}"
    command = [program, "serve", "--upstream", upstream, "--listen", "127.0.0.1:0", "--admin", "off"]
    with log.open("w") as out, subprocess.Popen([*command, "--log-format", "json"], stdout=out, stderr=out) as gateway:
        try:
            address = re.compile(r"127\.0\.0\.1:(\d+)")
            ports = until(lambda: [int(port) for port in address.findall(log.read_text()) if int(port) != model.port])
            yield ports[0]
        finally:
            gateway.kill()


@pytest.mark.parametrize("client", CLIENTS)
def test_the_real_gateway_ends_a_call_whose_connection_stays_open(client: str, tmp_path: Path) -> None:
    """By its number alone: what stands between does not close the connection to the gateway."""
    log = tmp_path / "log"
    with serving("hang") as model, real_gateway(model, log) as port:
        relay = Relay(port)
        limiter = tidegate.Limiter(1, gateway=relay.url)
        call = limiter.submit(CLIENTS[client], relay.url)
        until(lambda: model.active == 1 and reads(call))
        call.cancel()
        until(call.done)
        until(lambda: len(model.closed) == 1)
        until(lambda: "cancelled_by_client" in log.read_text())
        (line,) = [json.loads(line) for line in log.read_text().splitlines() if "cancelled_by_client" in line]
        assert (line["outcome"], line["work_end"], line["attempts"]) == ("stopped", "cancelled", 1)
        assert len(model.requests) == 1
        relay.close()
        idle(limiter)
