"""One call, one line in the access log with both of its ends; the metrics agree; and neither holds a prompt, an
answer or a key."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from real.clients import openai_counted
from support.fake import Fake
from support.gateway import Gateway

pytestmark = pytest.mark.gateway

PROMPT = "a-very-private-question"
KEY = "sk-a-very-private-key"
HEADERS = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}


def body(**more: object) -> dict:
    return {"model": "fake", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5} | more


def test_a_stream_that_ends_well(front: Gateway, fake: Fake):
    asking = body(stream=True, stream_options={"include_usage": True})
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=asking | fake.script(tokens=5).body, headers=HEADERS)
    line = front.access(answer.headers["x-request-id"])
    assert line["outcome"] == "ok" and line["status"] == 200
    assert line["wait_end"] == "answered" and line["work_end"] == "complete"
    assert line["stream"] is True and line["model"] == "fake" and line["dialect"] == "openai"
    assert line["output_tokens"] == 5 and line["usage"] == "reported"
    assert line["response_bytes"] == len(answer.content)
    times = [line[name] for name in ("admitted_ms", "sent_ms", "head_ms", "first_byte_ms", "wait_ended_ms")]
    assert times == sorted(times)


@pytest.fixture(scope="module")
def asking(fake: Fake) -> Iterator[Gateway]:
    """In front of a server of a kind that is known to tell the usage when it is asked to."""
    with Gateway(config=f'[[upstreams]]\nurl = "{fake.url}"\nkind = "vllm"\n') as gateway:
        yield gateway


def test_the_gateway_asks_for_usage_and_keeps_it(asking: Gateway, fake: Fake):
    script = fake.script(tokens=5)
    client, _ = openai_counted(asking.url)
    chunks = list(client.chat.completions.create(**body(), stream=True, extra_body=script.body))
    assert all(chunk.choices and not chunk.usage for chunk in chunks), "the client did not ask"
    plain = httpx.post(f"{asking.url}/v1/chat/completions", json=body(stream=True) | fake.script(tokens=5).body)
    line = asking.access(plain.headers["x-request-id"])
    assert line["usage"] == "reported" and line["output_tokens"] == 5
    assert "usage" not in plain.text


def test_a_client_that_leaves(front: Gateway, fake: Fake):
    script = fake.script(tokens=1000, pace_ms=10)
    url = f"{front.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(stream=True) | script.body, headers=HEADERS) as answer:
        next(answer.iter_bytes())
    script.wait_left()
    line = front.access(answer.headers["x-request-id"])
    assert line["outcome"] == "client_closed" and line["phase"] == "streaming"
    assert line["wait_end"] == "left" and line["work_end"] == "cancelled"
    assert line["work_ended_ms"] - line["wait_ended_ms"] < 5000
    assert line["usage"] != "reported"


def test_a_refusal(front: Gateway):
    answer = httpx.post(f"{front.url}/v1/chat/completions", content=b"{", headers=HEADERS)
    line = front.access(answer.headers["x-request-id"])
    assert line["outcome"] == "refused" and line["status"] == 400
    assert line["work_end"] == "none" and line["attempts"] == 0


def test_a_broken_stream(front: Gateway, fake: Fake):
    script = fake.script(tokens=50, end="rst", end_at=5)
    with pytest.raises(httpx.TransportError):
        with httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body(stream=True) | script.body) as answer:
            answer.read()
    line = front.access(answer.headers["x-request-id"])
    assert line["outcome"] == "upstream_truncated"
    assert line["wait_end"] == "failed" and line["work_end"] == "failed"


def test_a_callers_own_request_id_is_kept(front: Gateway, fake: Fake):
    headers = {"x-request-id": "caller-7"}
    body_ = body() | fake.script(tokens=1).body
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=body_, headers=headers)
    assert answer.headers["x-request-id"]


def test_the_counts_add_up(front: Gateway, fake: Fake):
    """running = attended + abandoned, admitted = queued + started + left, at rest all is ended."""
    for _ in range(5):
        httpx.post(f"{front.url}/v1/chat/completions", json=body() | fake.script(tokens=1).body)
    front.wait_metric(0, "tidegate_running")
    started = front.metric("tidegate_started_total")
    assert started == front.metric("tidegate_ended_total") > 0
    assert front.metric("tidegate_admitted_total") == started + front.metric("tidegate_left_queue_total")
    assert front.metric("tidegate_connections", side="upstream") < 80


def test_nothing_private_is_written(front: Gateway, fake: Fake):
    """After the calls above; the answers' words are in `token_text`."""
    script = fake.script(tokens=3, token_text="a-very-private-answer")
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=body() | script.body, headers=HEADERS)
    assert "a-very-private-answer" in answer.text
    front.access(answer.headers["x-request-id"])
    written = front.log() + httpx.get(f"{front.admin}/metrics").text
    assert "very-private" not in written
