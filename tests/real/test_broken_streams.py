"""What breaks after the first byte reaches every SDK as an exception, never as a short answer that looks whole; and a
client that leaves while nothing flows is noticed all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import anthropic
import httpx
import openai
import pytest

from real.clients import KEY, PROMPT, anthropic_counted, events, last_json, openai_counted
from support.fake import Fake, Script
from support.gateway import Gateway

pytestmark = pytest.mark.gateway

CHAT = {"model": "fake", "messages": PROMPT, "max_tokens": 50}
RESPONSES = {"model": "fake", "input": "tell me", "max_output_tokens": 50}


BREAKS = {
    "FIN": {"end": "fin", "end_at": 5},
    "RST": {"end": "rst", "end_at": 5},
    "FIN inside an event": {"end": "fin", "end_at": 5, "end_mid_event": True},
    "clean end before the terminal event": {"end": "clean", "end_at": 5},
    "bad chunk size": {"end": "bad_chunk", "end_at": 5},
    "close-delimited, cut": {"framing": "close", "end": "fin", "end_at": 5},
    "declared length not reached": {"framing": "length", "end": "short_length", "end_at": 5},
}


@pytest.fixture(params=BREAKS)
def broken(request: pytest.FixtureRequest, fake: Fake) -> Script:
    return fake.script(tokens=50, **BREAKS[request.param])


# --- on the wire --------------------------------------------------------------------------------------------------


def read_to_the_break(front: Gateway, path: str, body: dict) -> tuple[str, bool]:
    """What came, and whether the end was a proper one."""
    text = ""
    with httpx.stream("POST", front.url + path, json=body | {"stream": True}, timeout=20) as answer:
        assert answer.status_code == 200
        try:
            for piece in answer.iter_text():
                text += piece
        except httpx.RemoteProtocolError:
            return text, False
        except httpx.ReadError:
            return text, False
    return text, True


def test_openai_wire(broken: Script, front: Gateway):
    text, proper = read_to_the_break(front, "/v1/chat/completions", CHAT | broken.body)
    error = last_json(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "[DONE]" not in text
    assert not proper, "the end of a broken stream is no proper end"


def test_anthropic_wire(broken: Script, front: Gateway):
    text, proper = read_to_the_break(front, "/v1/messages", CHAT | broken.body)
    name, _ = events(text)[-1]
    assert name == "error"
    assert last_json(text)["type"] == "error"
    assert last_json(text)["error"]["message"]
    assert "message_stop" not in text
    assert not proper


def test_responses_wire(broken: Script, front: Gateway):
    text, proper = read_to_the_break(front, "/v1/responses", RESPONSES | broken.body)
    name, _ = events(text)[-1]
    assert name == "error"
    assert last_json(text)["type"] == "error"
    assert "response.completed" not in text
    assert not proper


# --- in the SDKs --------------------------------------------------------------------------------------------------


def consume(stream) -> int:
    return sum(1 for _ in stream)


def chat(front: Gateway, script: Script) -> None:
    client, _ = openai_counted(front.url)
    consume(client.chat.completions.create(**CHAT, stream=True, extra_body=script.body))


def chat_helper(front: Gateway, script: Script) -> None:
    client, _ = openai_counted(front.url)
    with client.chat.completions.stream(**CHAT, extra_body=script.body) as stream:
        consume(stream)


def completions(front: Gateway, script: Script) -> None:
    client, _ = openai_counted(front.url)
    consume(client.completions.create(model="fake", prompt="x", stream=True, extra_body=script.body))


def responses(front: Gateway, script: Script) -> None:
    client, _ = openai_counted(front.url)
    consume(client.responses.create(**RESPONSES, stream=True, extra_body=script.body))


def claude(front: Gateway, script: Script) -> None:
    client, _ = anthropic_counted(front.url)
    consume(client.messages.create(**CHAT, stream=True, extra_body=script.body))


def claude_helper(front: Gateway, script: Script) -> None:
    client, _ = anthropic_counted(front.url)
    with client.messages.stream(**CHAT, extra_body=script.body) as stream:
        stream.get_final_message()


def chat_async(front: Gateway, script: Script) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY) as client:
            async for _ in await client.chat.completions.create(**CHAT, stream=True, extra_body=script.body):
                pass

    asyncio.run(run())


CONSUMERS = [chat, chat_helper, completions, responses, claude, claude_helper, chat_async]


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_sdk_raises(consumer: Callable, broken: Script, front: Gateway):
    with pytest.raises(Exception) as raised:
        consumer(front, broken)
    assert isinstance(raised.value, (openai.APIError, anthropic.APIError)), repr(raised.value)
    assert len(broken.calls()) == 1, "what was begun is never tried again"


# What the server sends before its error event, in events, with that event.
ERROR_EVENTS = {
    chat: 4,
    chat_helper: 4,
    completions: 3,
    responses: 7,
    claude: 6,
    claude_helper: 6,
    chat_async: 4,
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_an_error_event_of_the_server_raises(consumer: Callable, fake: Fake, front: Gateway):
    """As real servers do it: an error event, then a clean end without the terminal event."""
    script = fake.script(tokens=50, error_at=2, end="clean", end_at=ERROR_EVENTS[consumer])
    with pytest.raises((openai.APIError, anthropic.APIError)):
        consumer(front, script)
    assert len(script.calls()) == 1


@pytest.mark.parametrize(
    ("path", "event_count"), [("/v1/chat/completions", 4), ("/v1/messages", 6), ("/v1/responses", 7)]
)
def test_an_error_event_of_the_server_passes(path: str, event_count: int, fake: Fake, front: Gateway):
    """As the server wrote it, and not followed by what would make it look whole."""
    script = fake.script(tokens=50, error_at=2, end="clean", end_at=event_count)
    text, proper = read_to_the_break(front, path, CHAT | {"input": "tell me"} | script.body)
    found = [json.loads(data) for _, data in events(text)]
    errors = [event for event in found if event.get("type") == "error" or isinstance(event.get("error"), dict)]
    assert "scripted failure" in str(errors[0])
    assert "[DONE]" not in text and "message_stop" not in text and "response.completed" not in text
    assert not proper


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_healthy_stream_raises_nothing(consumer: Callable, fake: Fake, front: Gateway):
    consumer(front, fake.script(tokens=5))


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(
    "odd",
    [
        {"line_end": "crlf"},
        {"line_end": "cr"},
        {"no_space": True},
        {"segment": "byte"},
        {"segment": "once"},
        {"comment": ": thinking\n\n"},
        {"token_text": "a\u2028b\u0085日本語 🙂 "},
        {"reasoning_tokens": 3},
        {"framing": "close"},
        {"framing": "http10"},
        {"chunk_extension": True},
        {"trailers": [["x-late", "1"]]},
        {"interim": [{"status": 103}]},
        {"end": "hang"},
        {"end": "extra"},
    ],
    ids=str,
)
def test_an_odd_but_whole_stream_raises_nothing(consumer: Callable, odd: dict, fake: Fake, front: Gateway):
    """Also where the server keeps its connection open after the terminal event: the answer ends at once."""
    consumer(front, fake.script(tokens=5, **odd))


def test_usage_is_not_shown_to_who_did_not_ask(fake: Fake, front: Gateway):
    client, _ = openai_counted(front.url)
    script = fake.script(tokens=5)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body=script.body))
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_tool_calls_of_claude(fake: Fake, front: Gateway):
    client, _ = anthropic_counted(front.url)
    with client.messages.stream(**CHAT, extra_body=fake.script(tool_calls=2).body) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content].count("tool_use") == 2
    assert message.stop_reason == "tool_use"


# --- before the stream --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429, 500, 502, 503, 529])
def test_the_servers_status_is_the_clients_status(status: int, fake: Fake, front: Gateway):
    client, sent = openai_counted(front.url, max_retries=0)
    with pytest.raises(openai.APIStatusError, match="scripted failure") as raised:
        client.chat.completions.create(**CHAT, stream=True, extra_body=fake.script(status=status).body)
    assert raised.value.status_code == status
    claude, sent = anthropic_counted(front.url, max_retries=0)
    with pytest.raises(anthropic.APIStatusError, match="scripted failure") as raised:
        claude.messages.create(**CHAT, extra_body=fake.script(status=status).body)
    assert raised.value.status_code == status


def test_html_becomes_a_message(fake: Fake, front: Gateway):
    client, _ = openai_counted(front.url, max_retries=0)
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**CHAT, extra_body=fake.script(status=502, body="html").body)
    assert raised.value.body["message"], "not only a status"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_sdk_retries_reach_the_server_once_each(stream: bool, fake: Fake, front: Gateway):
    """The gateway adds no tries of its own."""
    busy = {"status": 503, "retry_after": "1"}
    script = fake.script(tokens=3, attempts=[busy, busy, {"status": 200}])
    client, sent = openai_counted(front.url)
    answer = client.chat.completions.create(**CHAT, stream=stream, extra_body=script.body)
    if stream:
        consume(answer)
    assert sent.statuses == [503, 503, 200]
    assert len(script.calls()) == 3


def test_retry_after_passes(fake: Fake, front: Gateway):
    for status in (429, 503):
        body = CHAT | fake.script(status=status, retry_after="7").body
        answer = httpx.post(f"{front.url}/v1/chat/completions", json=body)
        assert answer.headers["retry-after"] == "7"


def test_json_in_place_of_a_stream_is_an_error(fake: Fake, front: Gateway):
    """SDKs take it for an empty answer."""
    client, _ = openai_counted(front.url, max_retries=0)
    with pytest.raises(openai.APIStatusError):
        consume(client.chat.completions.create(**CHAT, stream=True, extra_body=fake.script(body="chat").body))


# --- leaving while nothing flows ----------------------------------------------------------------------------------

SILENCES = {
    "before the head": {"delay_ms": 60_000},
    "before the first event": {"first_ms": 60_000},
    "in mid-stream": {"stall": {"at": {"event": 5}}},
    "inside an event": {"stall": {"at": {"mid_event": 5}}},
    "between tokens": {"tokens": 10_000, "pace_ms": 20},
}


@pytest.fixture(params=SILENCES)
def silent(request: pytest.FixtureRequest, fake: Fake) -> Script:
    return fake.script(**{"tokens": 50} | SILENCES[request.param])


def leave_chat(front: Gateway, script: Script, stream: bool) -> None:
    client, _ = openai_counted(front.url, max_retries=0, timeout=0.6)
    with suppress(openai.APITimeoutError):
        answer = client.chat.completions.create(**CHAT, stream=stream, extra_body=script.body)
        for _, _ in zip(range(20), answer, strict=False):
            pass
        answer.close()


def leave_claude(front: Gateway, script: Script, stream: bool) -> None:
    async def read(client: anthropic.AsyncAnthropic) -> None:
        if not stream:
            await client.messages.create(**CHAT, extra_body=script.body)
        async for _ in await client.messages.create(**CHAT, stream=True, extra_body=script.body):
            pass

    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=front.url, api_key=KEY) as client:
            with suppress(TimeoutError):
                await asyncio.wait_for(read(client), 0.6)

    asyncio.run(run())


@pytest.mark.parametrize("leave", [leave_chat, leave_claude])
def test_a_silent_stream_is_left(leave: Callable, silent: Script, front: Gateway):
    leave(front, silent, stream=True)
    call = silent.wait_left()
    assert call["tokens_after_peer_left"] <= 1
    assert len(silent.calls()) == 1


@pytest.mark.parametrize("leave", [leave_chat, leave_claude])
def test_a_silent_whole_answer_is_left(leave: Callable, fake: Fake, front: Gateway):
    script = fake.script(delay_ms=60_000)
    leave(front, script, stream=False)
    script.wait_left()
    assert len(script.calls()) == 1


def test_nothing_stays_behind(front: Gateway):
    """After all of the above: no call runs, none is queued, none is abandoned."""
    for name in ("tidegate_running", "tidegate_queued", "tidegate_abandoned"):
        front.wait_metric(0, name, within=5)
    assert front.metric("tidegate_panics_total") == 0
