"""More calls than slots: a bounded wait in the gateway, typed refusals that SDKs understand, and callers that leave
while they wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anthropic
import httpx
import openai
import pytest

from real.clients import KEY, PROMPT, anthropic_counted, anthropic_error, openai_counted, openai_error
from support.gateway import Gateway
from support.llama import ENDLESS, Llama, Work
from support.process import until

pytestmark = pytest.mark.gateway

SHORT = {"model": "tiny", "messages": PROMPT, "max_tokens": 3}


@pytest.fixture(scope="module")
def narrow(llama: Llama) -> Iterator[Gateway]:
    """One slot, nobody waits."""
    with Gateway("--upstream", llama.url, "--slots", "1", "--queue", "0") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def queueing(llama: Llama) -> Iterator[Gateway]:
    """One slot, two may wait."""
    with Gateway("--upstream", llama.url, "--slots", "1", "--queue", "2", "--queue-timeout", "20s") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def impatient(llama: Llama) -> Iterator[Gateway]:
    with Gateway("--upstream", llama.url, "--slots", "1", "--queue", "2", "--queue-timeout", "1s") as gateway:
        yield gateway


@contextmanager
def occupied(gateway: Gateway, work: Work) -> Iterator[None]:
    """The slot is taken by a stream that does not end by itself. Its reader takes what comes, as a client does."""
    leaving = threading.Event()

    def occupy() -> None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as client:
            with client.chat.completions.create(**SHORT | {"max_tokens": ENDLESS}, stream=True) as chunks:
                for _ in chunks:
                    if leaving.is_set():
                        return

    occupier = threading.Thread(target=occupy)
    occupier.start()
    try:
        work.wait_launched()
        yield
    finally:
        leaving.set()
        occupier.join()
    work.wait_stopped()


def queued(gateway: Gateway) -> float:
    return gateway.metric("tidegate_queued")


def test_refused_when_full(narrow: Gateway, work: Work):
    with occupied(narrow, work):
        for path, error_of, statuses in (
            ("/v1/chat/completions", openai_error, {429, 503}),
            ("/v1/messages", anthropic_error, {429, 503, 529}),
        ):
            answer = httpx.post(narrow.url + path, json=SHORT)
            assert answer.status_code in statuses
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error_of(answer)
    assert len(work.launched()) == 1


def test_sdk_tries_again_and_gives_up(narrow: Gateway, work: Work):
    with occupied(narrow, work):
        client, sent = openai_counted(narrow.url, max_retries=1)
        with pytest.raises((openai.RateLimitError, openai.InternalServerError)):
            client.chat.completions.create(**SHORT)
        assert len(sent.statuses) == 2

        claude, sent = anthropic_counted(narrow.url, max_retries=1)
        with pytest.raises(anthropic.APIStatusError):
            claude.messages.create(**SHORT)
        assert len(sent.statuses) == 2
    assert len(work.launched()) == 1


def test_sdk_tries_again_and_succeeds(narrow: Gateway, work: Work):
    client, sent = openai_counted(narrow.url, max_retries=5)
    with occupied(narrow, work):
        answers = []
        caller = threading.Thread(target=lambda: answers.append(client.chat.completions.create(**SHORT)))
        caller.start()
        until(lambda: sent.statuses, 5, "the first answer")
    caller.join()
    assert answers[0].usage.completion_tokens == 3
    assert sent.statuses[-1] == 200
    assert set(sent.statuses[:-1]) <= {429, 503} and len(sent.statuses) > 1
    assert [request.headers["x-stainless-retry-count"] for request in sent.requests][:2] == ["0", "1"]


def test_one_slot_runs_one_call(queueing: Gateway, work: Work):
    """The others wait in the gateway, not in the server."""
    with occupied(queueing, work):
        answers = []
        callers = [
            threading.Thread(
                target=lambda: answers.append(openai_counted(queueing.url)[0].chat.completions.create(**SHORT))
            )
            for _ in range(2)
        ]
        for caller in callers:
            caller.start()
        until(lambda: queued(queueing) == 2, 5, "two calls wait")
        assert len(work.launched()) == 1
        assert httpx.post(f"{queueing.url}/v1/chat/completions", json=SHORT).status_code in (429, 503), "full"
    for caller in callers:
        caller.join()
    assert [answer.usage.completion_tokens for answer in answers] == [3, 3]
    assert len(work.launched()) == 3


def leave_by_timeout(gateway: Gateway) -> None:
    client, _ = openai_counted(gateway.url, max_retries=0, timeout=1)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**SHORT)


def leave_a_stream_by_timeout(gateway: Gateway) -> None:
    client, _ = openai_counted(gateway.url, max_retries=0, timeout=1)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**SHORT, stream=True)


def leave_by_cancel(gateway: Gateway) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY) as client:
            task = asyncio.create_task(client.messages.create(**SHORT))
            await asyncio.to_thread(until, lambda: queued(gateway) == 1, 5, "the call waits")
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())


@pytest.mark.parametrize("leave", [leave_by_timeout, leave_a_stream_by_timeout, leave_by_cancel])
def test_who_leaves_the_queue_never_reaches_the_server(leave, queueing: Gateway, work: Work):
    with occupied(queueing, work):
        leave(queueing)
        until(lambda: queued(queueing) == 0, 2, "the place in the queue is free")
    assert len(work.launched()) == 1
    # The slot is free again, and nobody else comes before this call.
    assert openai_counted(queueing.url)[0].chat.completions.create(**SHORT).usage.completion_tokens == 3
    assert len(work.launched()) == 2


def test_the_wait_is_bounded(impatient: Gateway, work: Work):
    with occupied(impatient, work):
        answer = httpx.post(f"{impatient.url}/v1/chat/completions", json=SHORT, timeout=10)
        assert answer.status_code in (429, 503)
        assert 0.9 < answer.elapsed.total_seconds() < 3
        assert answer.headers["retry-after"]
        openai_error(answer)
    assert len(work.launched()) == 1
