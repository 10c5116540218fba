"""Behind nginx and HAProxy: events are not held back, and a client that leaves the edge is gone for the server too."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from real.clients import PROMPT, anthropic_counted, openai_counted
from support.edge import KINDS, Edge
from support.fake import Fake
from support.gateway import Gateway

pytestmark = pytest.mark.gateway

CHAT = {"model": "fake", "messages": PROMPT, "max_tokens": 50}


@pytest.fixture(scope="module", params=KINDS)
def edge(request: pytest.FixtureRequest, front: Gateway) -> Iterator[Edge]:
    with Edge(request.param, front.url) as server:
        yield server


def test_streams_of_both_sdks(edge: Edge, fake: Fake):
    client, _ = openai_counted(edge.url)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body=fake.script(tokens=7).body))
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 7
    claude, _ = anthropic_counted(edge.url)
    with claude.messages.stream(**CHAT, extra_body=fake.script(tokens=7).body) as stream:
        assert stream.get_final_message().usage.output_tokens == 7


def test_the_first_event_is_there_before_the_second_is_made(edge: Edge, fake: Fake):
    script = fake.script(tokens=3, pace_ms=1500)
    with httpx.stream("POST", f"{edge.url}/v1/chat/completions", json=CHAT | {"stream": True} | script.body) as answer:
        assert "data:" in next(answer.iter_text())
        assert script.calls()[0]["tokens"] <= 1


def test_leaving_the_edge_ends_the_work(edge: Edge, fake: Fake):
    script = fake.script(tokens=10_000, pace_ms=20)
    with httpx.stream("POST", f"{edge.url}/v1/chat/completions", json=CHAT | {"stream": True} | script.body) as answer:
        next(answer.iter_text())
    assert script.wait_left(within=3)["tokens"] < 200


def test_errors_pass_the_edge(edge: Edge, fake: Fake):
    answer = httpx.post(f"{edge.url}/v1/chat/completions", json=CHAT | fake.script(status=429, retry_after="3").body)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["message"]


def test_a_broken_stream_has_its_error_at_the_edge(edge: Edge, fake: Fake):
    """nginx turns any end of a body into a proper one: the error event is all that the client has."""
    script = fake.script(tokens=50, end="rst", end_at=5)
    client, _ = openai_counted(edge.url, max_retries=0)
    with pytest.raises(Exception, match="."):
        list(client.chat.completions.create(**CHAT, stream=True, extra_body=script.body))
