"""A call's number goes to the gateway with its requests, and the gateway is told when the call is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import requests
from server import serving, until
from work import idle

import tidegate

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def number_in(head: bytes) -> str:
    found = re.search(rb"(?i)x-tidegate-call: ([A-Za-z0-9_.:-]{1,64})\r?\n?", head + b"\r\n")
    return found[1].decode() if found else ""


@pytest.mark.parametrize("client", ["openai", "httpx", "requests"])
def test_the_gateway_is_told(client: str) -> None:
    with serving("hang", "answer") as gateway:
        limiter = tidegate.Limiter(1, gateway=gateway.url + "/v1")
        keys = {"authorization": "Bearer mine"}
        asks: dict[str, Any] = {
            "openai": lambda: openai.OpenAI(base_url=gateway.url + "/v1", api_key="mine").chat.completions.create(
                model="m", messages=MESSAGES
            ),
            "httpx": lambda: httpx.post(gateway.url + "/v1/x", headers=keys, timeout=60),
            "requests": lambda: requests.post(gateway.url + "/v1/x", headers=keys, timeout=60),
        }
        call = limiter.submit(asks[client])
        until(lambda: len(gateway.requests) == 1)
        number = number_in(gateway.requests[0])
        assert number
        call.cancel()
        until(lambda: len(gateway.requests) == 2)
        told = gateway.requests[1]
        assert told.startswith(f"POST /v1/calls/{number}/cancel HTTP/1.1".encode())
        assert b"authorization: bearer mine" in told.lower()
        until(call.done)
        idle(limiter)


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


def test_a_call_that_is_left_is_cancelled_by_the_real_gateway() -> None:
    """The gateway of the wheel before a model server that hangs: what it sends there ends."""
    program = Path(sys.executable).parent / "tidegate"
    with serving("hang") as model:
        command = [program, "serve", "--upstream", f"http://127.0.0.1:{model.port}", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as gateway:
            try:
                assert gateway.stdout is not None
                port = 0
                for line in gateway.stdout:
                    if found := re.search(r"127\.0\.0\.1:(\d+)", line.replace(f"127.0.0.1:{model.port}", "")):
                        port = int(found[1])
                        break
                limiter = tidegate.Limiter(1, gateway=f"http://127.0.0.1:{port}")
                client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k")
                call = limiter.submit(client.chat.completions.create, model="m", messages=MESSAGES)
                until(lambda: model.active == 1)
                call.cancel()
                until(call.done)
                until(lambda: len(model.closed) == 1)
                assert len(model.requests) == 1
                idle(limiter)
            finally:
                gateway.kill()
