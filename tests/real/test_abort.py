"""A client that leaves, in each way its SDK has, ends the work of the model server. The calls are `ENDLESS`: a stop
seen within seconds is the gateway's doing."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress

import anthropic
import httpx
import openai
import pytest

from real.clients import KEY, PROMPT
from support.gateway import Gateway
from support.llama import ENDLESS, Llama, Work
from support.process import until

CHAT = {"model": "tiny", "messages": PROMPT, "max_tokens": ENDLESS}
RESPONSES = {"model": "tiny", "input": "tell me", "max_output_tokens": ENDLESS}


def take(events: Iterator, count: int = 5) -> None:
    for _ in range(count):
        next(events)


def stopped(work: Work) -> None:
    """Far from the end: an abandoned call would go on for many thousand tokens."""
    assert work.wait_stopped() < ENDLESS / 2


# --- streams, synchronous clients ---------------------------------------------------------------------------------


def chat_stream(client: openai.OpenAI):
    return client.chat.completions.create(**CHAT, stream=True)


def completions_stream(client: openai.OpenAI):
    return client.completions.create(model="tiny", prompt="tell me", max_tokens=ENDLESS, stream=True)


def responses_stream(client: openai.OpenAI):
    return client.responses.create(**RESPONSES, stream=True)


def close(stream) -> None:
    take(iter(stream))
    stream.close()


def leave_the_with_block(stream) -> None:
    with stream as events:
        take(iter(events))


def raise_in_the_with_block(stream) -> None:
    with suppress(ZeroDivisionError), stream as events:
        take(iter(events))
        _ = 1 / 0


@pytest.mark.parametrize("leave", [close, leave_the_with_block, raise_in_the_with_block])
@pytest.mark.parametrize("open_stream", [chat_stream, completions_stream, responses_stream])
def test_openai_stream(open_stream: Callable, leave: Callable, chat: openai.OpenAI, work: Work):
    leave(open_stream(chat))
    stopped(work)


def test_openai_break(chat: openai.OpenAI, work: Work):
    """`break` alone sends nothing: the socket closes when the stream is collected."""
    take(iter(chat_stream(chat)))
    gc.collect()
    stopped(work)


def test_openai_client_closed(gateway: Gateway, work: Work):
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY)
    take(iter(chat_stream(client)))
    client.close()
    stopped(work)


@pytest.mark.parametrize("leave", [close, leave_the_with_block])
def test_anthropic_raw_stream(leave: Callable, claude: anthropic.Anthropic, work: Work):
    leave(claude.messages.create(**CHAT, stream=True))
    stopped(work)


def test_anthropic_helper(claude: anthropic.Anthropic, work: Work):
    with claude.messages.stream(**CHAT) as events:
        take(iter(events.text_stream))
    stopped(work)


# --- asynchronous clients -----------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_async(gateway: Gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_async(gateway: Gateway):
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        yield client


async def openai_reader(gateway: Gateway, reading: asyncio.Event, whole: bool = False) -> None:
    async with openai_async(gateway) as client:
        if whole:
            await client.chat.completions.create(**CHAT)
        async for _ in await client.chat.completions.create(**CHAT, stream=True):
            reading.set()


async def responses_reader(gateway: Gateway, reading: asyncio.Event, whole: bool = False) -> None:
    async with openai_async(gateway) as client:
        if whole:
            await client.responses.create(**RESPONSES)
        async for _ in await client.responses.create(**RESPONSES, stream=True):
            reading.set()


async def anthropic_reader(gateway: Gateway, reading: asyncio.Event, whole: bool = False) -> None:
    async with anthropic_async(gateway) as client:
        if whole:
            # The SDK refuses long calls without a stream, unless a timeout says that they are meant.
            await client.messages.create(**CHAT, timeout=60)
        async for _ in await client.messages.create(**CHAT, stream=True):
            reading.set()


READERS = [openai_reader, responses_reader, anthropic_reader]


@pytest.mark.parametrize("reader", READERS)
def test_task_cancelled_in_mid_stream(reader: Callable, gateway: Gateway, work: Work):
    async def run() -> None:
        reading = asyncio.Event()
        task = asyncio.create_task(reader(gateway, reading))
        await reading.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    stopped(work)


@pytest.mark.parametrize("reader", READERS)
def test_task_cancelled_before_a_whole_answer(reader: Callable, gateway: Gateway, work: Work):
    async def run() -> None:
        task = asyncio.create_task(reader(gateway, asyncio.Event(), whole=True))
        await asyncio.to_thread(work.wait_launched)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    stopped(work)


@pytest.mark.parametrize("reader", READERS)
def test_wait_for_in_mid_stream(reader: Callable, gateway: Gateway, work: Work):
    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader(gateway, asyncio.Event()), timeout=1)

    asyncio.run(run())
    stopped(work)


def test_aclose(gateway: Gateway, work: Work):
    async def run() -> None:
        async with openai_async(gateway) as client:
            stream = await client.chat.completions.create(**CHAT, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await asyncio.to_thread(stopped, work)

    asyncio.run(run())


# --- no stream ----------------------------------------------------------------------------------------------------


def test_openai_timeout_before_a_whole_answer(chat: openai.OpenAI, work: Work):
    with pytest.raises(openai.APITimeoutError):
        chat.with_options(timeout=1).chat.completions.create(**CHAT)
    stopped(work)


def test_anthropic_timeout_before_a_whole_answer(claude: anthropic.Anthropic, work: Work):
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=1).messages.create(**CHAT)
    stopped(work)


@pytest.mark.gateway
def test_a_whole_answer_is_stopped_beside_a_busy_stream(chat: openai.OpenAI, work: Work):
    """By itself llama.cpp looks after the client of a call without a stream only when nothing else goes on; so the
    gateway asks it for streams, and puts them together."""
    with chat_stream(chat) as neighbour:
        events = iter(neighbour)
        take(events)
        leaving = threading.Event()
        reader = threading.Thread(target=lambda: [next(events) for _ in iter(leaving.is_set, True)])
        reader.start()
        try:
            with pytest.raises(openai.APITimeoutError):
                chat.with_options(timeout=1).chat.completions.create(**CHAT)
            # 20 to 30 ms, as for streams; the tokens are those of the second that the client waited, far from 20,000.
            assert work.wait_stopped(within=2) < ENDLESS / 2
            assert len(work.launched()) == 2, "the neighbour and the call"
        finally:
            leaving.set()
            reader.join()
    work.wait_stopped(2)


# --- below the SDKs -----------------------------------------------------------------------------------------------


def raw_call(gateway: Gateway, stream: bool) -> socket.socket:
    """A chat call sent by hand."""
    url = httpx.URL(gateway.url)
    body = httpx.Request("POST", url, json=CHAT | {"stream": stream}).content
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    peer = socket.create_connection((url.host, url.port), timeout=10)
    peer.sendall(head.encode() + body)
    return peer


def fin(peer: socket.socket) -> None:
    peer.close()


def rst(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def half_close(peer: socket.socket) -> None:
    """Reads on: to a model server that is gone too."""
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("leave", [fin, rst, half_close])
def test_the_socket_closes(leave: Callable, stream: bool, gateway: Gateway, work: Work):
    with raw_call(gateway, stream) as peer:
        work.wait_launched()
        if stream:
            assert peer.recv(1), "the answer begins"
        leave(peer)
        stopped(work)


def test_prefill_is_left(chat: openai.OpenAI, work: Work):
    """Nothing flows yet. llama.cpp stops at the next batch of the prompt."""
    words = " ".join(f"leave{number}" for number in range(3000))  # not in the server's prompt cache
    prompt = [{"role": "user", "content": words}]
    with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):  # httpx's own: older SDKs
        take(chat.with_options(timeout=0.3).chat.completions.create(**CHAT | {"messages": prompt}, stream=True))
    work.wait_launched()
    work.wait_stopped(within=10)


def test_nothing_is_left_running(gateway: Gateway, llama: Llama, work: Work):
    """Fifty clients at once, each gone after five events."""

    def caller() -> None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=50) as client:
            with suppress(openai.RateLimitError, openai.InternalServerError):
                with chat_stream(client) as events:
                    take(iter(events))

    callers = [threading.Thread(target=caller) for _ in range(50)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    until(lambda: len(work.released()) == len(work.launched()), 5, "all that was started is stopped")
    assert llama.busy() == 0
