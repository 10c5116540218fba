"""Each wait has a limit of its own: before the first byte 504 in the shape of the API, after it an error event; and
the server's work stops with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from real.clients import PROMPT, anthropic_counted, openai_counted, openai_error
from support.fake import Fake
from support.gateway import Gateway

pytestmark = pytest.mark.gateway

CHAT = {"model": "fake", "messages": PROMPT, "max_tokens": 50}


@pytest.fixture(scope="module")
def hasty(fake: Fake) -> Iterator[Gateway]:
    config = f"""
[[upstreams]]
url = "{fake.url}"
slots = 8
[upstreams.timeouts]
response_head = "1s"
first_event = "1s"
silence = "1s"
idle = "2s"
"""
    with Gateway(config=config) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def beating(fake: Fake) -> Iterator[Gateway]:
    """Tells its clients that it is alive while the server thinks."""
    with Gateway(config=f'[[upstreams]]\nurl = "{fake.url}"\nheartbeat = "200ms"\n') as gateway:
        yield gateway


def test_response_head(hasty: Gateway, fake: Fake):
    script = fake.script(delay_ms=60_000)
    answer = httpx.post(f"{hasty.url}/v1/chat/completions", json=CHAT | script.body, timeout=10)
    assert answer.status_code == 504
    openai_error(answer)
    assert hasty.access(answer.headers["x-request-id"])["reason"] == "response_head"
    script.wait_left()


def test_response_head_in_the_sdks(hasty: Gateway, fake: Fake):
    client, sent = openai_counted(hasty.url, max_retries=1)
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**CHAT, extra_body=fake.script(delay_ms=60_000).body)
    assert raised.value.status_code == 504
    assert sent.statuses == [504, 504]


STALLS = {
    "first_event": {"first_ms": 60_000},
    "silence": {"stall": {"at": {"event": 5}}},
    "idle": {"stall": {"at": {"event": 5}}, "heartbeat_ms": 100},
}


def chat(gateway: Gateway, body: dict) -> None:
    client, _ = openai_counted(gateway.url, max_retries=0)
    for _ in client.chat.completions.create(**CHAT, stream=True, extra_body=body):
        pass


def claude(gateway: Gateway, body: dict) -> None:
    client, _ = anthropic_counted(gateway.url, max_retries=0)
    for _ in client.messages.create(**CHAT, stream=True, extra_body=body):
        pass


@pytest.mark.parametrize("consume", [chat, claude])
@pytest.mark.parametrize("tier", STALLS)
def test_a_stall(tier: str, consume: Callable, hasty: Gateway, fake: Fake):
    script = fake.script(tokens=50, **STALLS[tier])
    before = hasty.metric("tidegate_timeouts_total", tier=tier)
    with pytest.raises(Exception, match=r"(?i)no |within|time|idle|silen"):
        consume(hasty, script.body)
    script.wait_left()
    assert hasty.metric("tidegate_timeouts_total", tier=tier) == before + 1


def test_pings_keep_the_silence_tier_fed(hasty: Gateway, fake: Fake):
    """A server that thinks for longer than the silence limit, but says so."""
    script = fake.script(tokens=5, stall={"at": {"event": 3}, "ms": 1500}, heartbeat_ms=100)
    chat(hasty, script.body)


def test_heartbeats(beating: Gateway, fake: Fake):
    """Comments at event boundaries, which no SDK minds."""
    script = fake.script(tokens=5, stall={"at": {"event": 3}, "ms": 3000})
    answer = httpx.post(f"{beating.url}/v1/chat/completions", json=CHAT | {"stream": True} | script.body)
    blocks = answer.text.split("\n\n")
    assert sum(block.startswith(":") for block in blocks) >= 3
    assert all(block.startswith((":", "data: ")) for block in blocks if block)
    for consume in (chat, claude):
        consume(beating, fake.script(tokens=5, stall={"at": {"event": 3}, "ms": 700}).body)
