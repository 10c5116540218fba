"""SDK clients that count what they send, and the sentences that the tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai

KEY = "sk-any"
PROMPT = [{"role": "user", "content": "tell me"}]


@dataclass
class Sent:
    """Requests of one client, and the answers' statuses."""

    requests: list[Any] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def hooks(self) -> dict[str, list[Callable]]:
        return {
            "request": [self.requests.append],
            "response": [lambda answer: self.statuses.append(answer.status_code)],
        }


def openai_counted(url: str, **options) -> tuple[openai.OpenAI, Sent]:
    sent = Sent()
    http_client = openai.DefaultHttpxClient(event_hooks=sent.hooks())
    return openai.OpenAI(**{"base_url": f"{url}/v1", "api_key": KEY, "http_client": http_client} | options), sent


def anthropic_counted(url: str, **options) -> tuple[anthropic.Anthropic, Sent]:
    sent = Sent()
    http_client = anthropic.DefaultHttpxClient(event_hooks=sent.hooks())
    return anthropic.Anthropic(**{"base_url": url, "api_key": KEY, "http_client": http_client} | options), sent


def openai_error(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after a look at its shape: all four keys, with a message."""
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert error["message"] and error["type"], error
    return error


def anthropic_error(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body["type"] == "error", body
    assert body["error"]["type"] and body["error"]["message"], body
    return body["error"]


def events(text: str) -> list[tuple[str | None, str]]:
    """(event name, data) of each event of a stream."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        data = [value for name, _, value in lines if name == "data"]
        if data:
            found.append((next((value for name, _, value in lines if name == "event"), None), "\n".join(data)))
    return found


def last_json(text: str) -> Any:
    return json.loads(events(text)[-1][1])
