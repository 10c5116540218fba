"""An answer through the gateway is the answer of the server: the same bytes, but for what differs from call to call
(ids, times, timings)."""

from __future__ import annotations

import json
import re

import httpx
import pytest

PROMPT = [{"role": "user", "content": "tell me"}]
STEADY = {"model": "tiny", "temperature": 0, "seed": 7, "cache_prompt": False}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
CALL_A_TOOL = {"tools": [WEATHER], "tool_choice": "required", "logit_bias": [[3, 100]]}

CASES = {
    "chat": ("/v1/chat/completions", STEADY | {"messages": PROMPT, "max_tokens": 24}),
    "chat, unicode": (
        "/v1/chat/completions",
        STEADY | {"messages": [{"role": "user", "content": "日本語 \u2028 🙂"}], "max_tokens": 8},
    ),
    "chat, several choices": ("/v1/chat/completions", STEADY | {"messages": PROMPT, "max_tokens": 8, "n": 2}),
    "chat, log probabilities": (
        "/v1/chat/completions",
        STEADY | {"messages": PROMPT, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    ),
    "chat, stop": ("/v1/chat/completions", STEADY | {"messages": PROMPT, "max_tokens": 64, "stop": ["y"]}),
    "chat, tools": ("/v1/chat/completions", STEADY | {"messages": PROMPT, "max_tokens": 120} | CALL_A_TOOL),
    "chat, JSON": (
        "/v1/chat/completions",
        STEADY
        | {"messages": PROMPT, "max_tokens": 64, "response_format": {"type": "json_object", "schema": {"enum": ["a"]}}},
    ),
    "completions": ("/v1/completions", STEADY | {"prompt": "once upon", "max_tokens": 24}),
    "completions, log probabilities": (
        "/v1/completions",
        STEADY | {"prompt": "once upon", "max_tokens": 8, "logprobs": 2},
    ),
    "completions, several prompts": ("/v1/completions", STEADY | {"prompt": ["once upon", "a time"], "max_tokens": 8}),
    "completions, several choices": ("/v1/completions", STEADY | {"prompt": "once upon", "max_tokens": 8, "n": 2}),
    "completions, echo": ("/v1/completions", STEADY | {"prompt": "once upon", "max_tokens": 8, "echo": True}),
    "messages": ("/v1/messages", STEADY | {"messages": PROMPT, "max_tokens": 24}),
    "messages, stop": ("/v1/messages", STEADY | {"messages": PROMPT, "max_tokens": 64, "stop_sequences": ["y"]}),
    "responses": ("/v1/responses", STEADY | {"input": "tell me", "max_output_tokens": 24}),
}
USAGE = {
    "usage not asked for": {},
    "usage asked for": {"stream_options": {"include_usage": True}},
}


def steady(text: str) -> str:
    """Without what the server makes anew for each call. Task numbers show in the ids of tool calls."""
    text = re.sub(r'"(id|item_id|call_id|created|created_at|completed_at)":("[^"]*"|\d+)', r'"\1":"…"', text)
    return re.sub(r'"timings":\{[^}]*\}', '"timings":"…"', text)


@pytest.mark.parametrize("case", CASES)
def test_whole_answer(case: str, http: httpx.Client, http_direct: httpx.Client):
    path, body = CASES[case]
    through, plain = (client.post(path, json=body) for client in (http, http_direct))
    assert through.status_code == plain.status_code == 200
    assert through.headers["content-type"] == plain.headers["content-type"]
    assert steady(through.text) == steady(plain.text)


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("case", CASES)
def test_stream(case: str, usage: str, http: httpx.Client, http_direct: httpx.Client):
    path, body = CASES[case]
    body = body | {"stream": True} | USAGE[usage]
    through, plain = (client.post(path, json=body) for client in (http, http_direct))
    assert through.status_code == plain.status_code == 200
    assert through.headers["content-type"].startswith("text/event-stream")
    assert steady(through.text) == steady(plain.text)


@pytest.mark.gateway
def test_stream_headers(http: httpx.Client):
    """What keeps proxies on the way from holding a stream back."""
    path, body = CASES["chat"]
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert "no-cache" in answer.headers["cache-control"]
        assert "content-length" not in answer.headers
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("text", ["one", ["one", "two"]], ids=["one", "several"])
def test_embeddings(text, http: httpx.Client, http_direct: httpx.Client):
    body = {"model": "tiny", "input": text}
    through, plain = (client.post("/v1/embeddings", json=body).json() for client in (http, http_direct))
    assert through["usage"] == plain["usage"]
    assert [row["index"] for row in through["data"]] == [row["index"] for row in plain["data"]]
    for ours, theirs in zip(through["data"], plain["data"], strict=True):
        assert ours["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5)


def test_models(http: httpx.Client):
    answer = http.get("/v1/models").json()
    assert answer["object"] == "list"
    assert "tiny" in [model["id"] for model in answer["data"]]


def test_count_tokens(http: httpx.Client, http_direct: httpx.Client):
    body = {"model": "tiny", "messages": PROMPT}
    through, plain = (client.post("/v1/messages/count_tokens", json=body).json() for client in (http, http_direct))
    assert through == plain


def test_large_prompt(http: httpx.Client, http_direct: httpx.Client):
    """About 100 kB of request body, and a prefill of thousands of tokens."""
    words = " ".join(f"word{number}" for number in range(3000))
    body = STEADY | {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
    through, plain = (client.post("/v1/chat/completions", json=body) for client in (http, http_direct))
    assert through.status_code == 200
    assert json.loads(steady(through.text)) == json.loads(steady(plain.text))
