"""Ending the unendable: the client libraries as their users have them, blocked on a server that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import anthropic
import boto3
import botocore.config
import grpc
import httpx
import httpx2
import openai
import pytest
import requests
import trustme
import urllib3
from server import Server, serving, until
from work import blocking, frames, idle, reads

import tidegate

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture
def bundle(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def boto(url: str, verify: Any) -> Callable[[], Any]:
    config = botocore.config.Config(retries={"max_attempts": 3, "mode": "standard"}, read_timeout=60)
    client = boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=config,
        verify=verify,
    )
    return lambda: client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "hi"}]}])


def retrying_requests(url: str, verify: Any) -> Callable[[], Any]:
    session = requests.Session()
    session.mount("http", requests.adapters.HTTPAdapter(max_retries=urllib3.Retry(3, allowed_methods=None)))
    return lambda: session.post(url + "/x", json={}, verify=verify, timeout=60)


def plain_http(url: str, verify: Any) -> Callable[[], Any]:
    host = url.split("//")[1]
    if url.startswith("https"):
        context = ssl.create_default_context(cafile=verify)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, context=context)
    else:
        connection = http.client.HTTPConnection(host)

    def ask() -> bytes:
        connection.request("POST", "/x", b"{}")
        return connection.getresponse().read()

    return ask


def httpx_context(verify: Any) -> Any:
    return ssl.create_default_context(cafile=verify) if verify else True


def openai_of(url: str, verify: Any) -> openai.OpenAI:
    http_client = openai.DefaultHttpxClient(verify=httpx_context(verify))
    return openai.OpenAI(base_url=url + "/v1", api_key="k", http_client=http_client)


def anthropic_of(url: str, verify: Any) -> anthropic.Anthropic:
    http_client = anthropic.DefaultHttpxClient(verify=httpx_context(verify))
    return anthropic.Anthropic(base_url=url, api_key="k", http_client=http_client)


def openai_chat(url: str, verify: Any) -> Callable[[], Any]:
    client = openai_of(url, verify)
    return lambda: client.chat.completions.create(model="m", messages=MESSAGES)


def anthropic_chat(url: str, verify: Any) -> Callable[[], Any]:
    client = anthropic_of(url, verify)
    return lambda: client.messages.create(model="m", max_tokens=5, messages=MESSAGES)


def with_httpx(url: str, verify: Any) -> Callable[[], Any]:
    client = httpx.Client(timeout=60, verify=httpx_context(verify))
    return lambda: client.post(url + "/x", json={}).read()


def with_httpx2(url: str, verify: Any) -> Callable[[], Any]:
    client = httpx2.Client(timeout=60, verify=httpx_context(verify))
    return lambda: client.post(url + "/x", json={}).read()


def with_urllib3(url: str, verify: Any) -> Callable[[], Any]:
    pool = urllib3.PoolManager(ca_certs=verify, retries=urllib3.Retry(3, allowed_methods=None))
    return lambda: pool.request("POST", url + "/x", body=b"{}", timeout=60).data


CLIENTS: dict[str, Callable[[str, Any], Callable[[], Any]]] = {
    "openai": openai_chat,
    "anthropic": anthropic_chat,
    "httpx": with_httpx,
    "httpx2": with_httpx2,
    "requests": retrying_requests,
    "urllib3": with_urllib3,
    "http.client": plain_http,
    "boto3": boto,
}


def leave_in_mid_call(limiter: tidegate.Limiter, server: Server, ask: Callable[[], Any]) -> tidegate.Call[Any]:
    """Starts a call, leaves it once the server has the request, and waits for its thread's end."""
    before = len(server.requests)
    call = limiter.submit(ask)
    until(lambda: len(server.requests) > before and reads(call))
    assert not call.cancel() and call.left
    until(call.done)
    return call


def one_is_severed() -> None:
    """Another call is left and ends: what would be severed with it has been by then."""
    limiter = tidegate.Limiter(1)
    with serving("hang") as server:
        leave_in_mid_call(limiter, server, with_httpx(server.url, None))
    idle(limiter)


@pytest.mark.parametrize("mode", ["hang", "part", "drip"])
@pytest.mark.parametrize("name", CLIENTS)
def test_the_thread_ends_and_nothing_is_sent_again(name: str, mode: str) -> None:
    limiter = tidegate.Limiter(2)
    with serving(mode) as server:
        call = leave_in_mid_call(limiter, server, CLIENTS[name](server.url, None))
        assert call.exception() is not None or name == "boto3"  # which takes half an answer for one
        until(lambda: len(server.closed) == 1)
        assert len(server.requests) == 1
        assert limiter.statistics().severed_total >= 1
    idle(limiter)


@pytest.mark.parametrize("name", CLIENTS)
def test_over_tls(name: str, authority: trustme.CA, bundle: str) -> None:
    limiter = tidegate.Limiter(2)
    with serving("hang", tls=server_context(authority)) as server:
        leave_in_mid_call(limiter, server, CLIENTS[name](server.url, bundle))
        until(lambda: len(server.closed) == 1)
        assert len(server.requests) == 1
    idle(limiter)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_on_a_connection_that_was_used_before(name: str, tls: bool, authority: trustme.CA, bundle: str) -> None:
    limiter = tidegate.Limiter(2)
    with serving("answer", "answer", "hang", tls=server_context(authority) if tls else None) as server:
        ask = CLIENTS[name](server.url, bundle if tls else None)
        for _ in range(2):
            call = limiter.submit(ask)
            try:
                call.result(10)
            except Exception:
                assert name in ("anthropic", "boto3")  # which make nothing of this answer
        assert server.connections == 1
        leave_in_mid_call(limiter, server, ask)
        until(lambda: len(server.closed) == 1)
        assert (len(server.requests), server.connections) == (3, 1)
    idle(limiter)


@pytest.mark.parametrize("name", ["openai", "anthropic", "httpx", "requests", "boto3"])
def test_no_other_calls_connection_is_touched(name: str) -> None:
    """Both in one pool: one leaves, the other has its answer."""
    limiter = tidegate.Limiter(8)
    with serving("hang") as server:
        ask = CLIENTS[name](server.url, None)
        for _ in range(10):
            before = len(server.closed)
            calls = [limiter.submit(ask) for _ in range(4)]
            until(lambda: server.active == 4)  # noqa: B023
            calls[0].cancel()
            calls[2].cancel()
            until(lambda: calls[0].done() and calls[2].done() and server.active == 2)  # noqa: B023
            assert not calls[1].done() and not calls[3].done()
            assert len(server.closed) == before + 2
            calls[1].cancel(), calls[3].cancel()
            until(lambda: server.active == 0)
        assert len(server.requests) == 40
    idle(limiter)


def test_a_stream_is_severed_while_it_is_read() -> None:
    limiter = tidegate.Limiter(1)
    with serving("events") as server:
        client = openai_of(server.url, None)
        seen = threading.Event()

        def read() -> None:
            for _ in client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                seen.set()

        call = limiter.submit(read)
        assert seen.wait(10)
        call.cancel()
        until(call.done)
        until(lambda: len(server.closed) == 1)
    idle(limiter)


def test_a_retry_that_sleeps_is_ended() -> None:
    """The server says 500, the SDK sleeps before it tries again."""
    limiter = tidegate.Limiter(1)
    with serving("error") as server:
        client = openai_of(server.url, None).with_options(max_retries=5)
        call = limiter.submit(client.chat.completions.create, model="m", messages=MESSAGES)
        until(lambda: len(server.requests) == 1 and "sleep" in frames(call))
        call.cancel()
        until(call.done)
        error = call.exception()
        assert isinstance(error, tidegate.Abandoned) and len(server.requests) == 1
        assert "may not sleep on" in str(error.__cause__)  # and not only: connect again, after the sleep
    idle(limiter)


def test_sleep_is_sleep_for_everybody_else() -> None:
    tidegate.Limiter(1).submit(int).result(5)
    begin = time.monotonic()
    time.sleep(0.02)
    assert time.monotonic() - begin >= 0.02

    class Sleeper:
        sleep = time.sleep

    Sleeper().sleep(0)  # no method of it
    with pytest.raises(ValueError):
        time.sleep(-1)
    with pytest.raises(TypeError):
        time.sleep("1")  # type: ignore[arg-type]
    limiter = tidegate.Limiter(1)
    assert limiter.submit(time.sleep, 0.001).result(5) is None
    with pytest.raises(ValueError):
        limiter.submit(time.sleep, -1).result(5)


def test_a_connect_that_hangs_is_severed() -> None:
    """A full backlog: the connection is never made."""
    limiter = tidegate.Limiter(1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        port = listener.getsockname()[1]
        call = limiter.submit(with_httpx(f"http://127.0.0.1:{port}", None))
        until(lambda: frames(call)[:1] == ["create_connection"])
        assert not call.done()
        call.cancel()
        until(call.done)
        for one in fill:
            one.close()
    idle(limiter)


def test_severing_can_be_turned_off_for_the_limiter_and_for_a_call() -> None:
    for limiter, ask in (
        (quiet := tidegate.Limiter(1, sever="off"), quiet.ask()),
        (loud := tidegate.Limiter(1), loud.ask(sever="off")),
    ):
        with serving("hang") as server:
            call = ask.submit(with_httpx(server.url, None))
            until(lambda: server.active == 1 and reads(call))  # noqa: B023
            call.cancel()
            one_is_severed()
            assert not call.done() and call.abandoned and limiter.statistics().severed_total == 0
            assert server.closed == []
            assert "read" in limiter.dump() and "nobody has waited for" in limiter.dump()
            server.close()  # ends it from the other side
            until(call.done)
        idle(limiter)


def test_a_function_that_severs() -> None:
    seen: list[tidegate.Call[Any]] = []
    limiter = tidegate.Limiter(1, sever=seen.append)
    with blocking() as work:
        call = limiter.submit(work)
        until(lambda: work.active)
        call.cancel()
        assert seen == [call]
    idle(limiter)


def test_what_cannot_be_severed_is_counted_with_its_stack() -> None:
    limiter = tidegate.Limiter(1, name="stuck")
    with blocking() as work:
        call = limiter.submit(work)
        until(lambda: work.active)
        call.cancel()
        one_is_severed()
        now = limiter.statistics()
        assert (now.abandoned, now.borrowers) == (1, (call,)) and now.oldest_abandoned is not None
        text = limiter.dump()
        assert "0 attended and 1 abandoned of 1" in text and "self.release.wait(300)" in text
    idle(limiter)


def test_work_that_comes_to_a_socket_later_is_severed_there() -> None:
    limiter = tidegate.Limiter(1)
    with serving("answer", "hang") as server, blocking() as work:
        client = httpx.Client(timeout=60)

        def slowly() -> None:
            client.get(server.url)  # a connection that is kept
            work()
            client.get(server.url)

        call = limiter.submit(slowly)
        until(lambda: work.active)
        call.cancel()
        work.release.set()
        until(call.done)
        until(lambda: server.active == 0)
    idle(limiter)


def test_work_may_ask_whether_anybody_waits() -> None:
    limiter = tidegate.Limiter(1)
    steps: list[bool] = []

    def stepwise() -> None:
        call = tidegate.current_call()
        assert call is not None
        while not call.left:
            steps.append(True)
            threading.Event().wait(0.001)

    call = limiter.submit(stepwise)
    until(lambda: len(steps) > 3)
    call.cancel()
    until(call.done)
    assert tidegate.current_call() is None


class _Http2(threading.Thread):
    """An HTTP/2 server that answers `/fast` and nothing else."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.streams = 0
        self.connections = 0
        self.waiting: list[Any] = []
        self.connection: socket.socket | None = None
        self.answered = False
        self.start()

    def end(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        with contextlib.suppress(OSError):
            self._serve()

    def _serve(self) -> None:
        import h2.config
        import h2.connection
        import h2.events

        connection, _ = self.listener.accept()
        self.connection = connection
        self.connections += 1
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        state.initiate_connection()
        connection.sendall(state.data_to_send())
        connection.settimeout(0.01)
        while True:
            try:
                data = connection.recv(65536)
            except TimeoutError:
                # httpcore's readers wait for each other; something to read lets the next one look.
                state.ping(b"12345678")
                connection.sendall(state.data_to_send())
                continue
            if not data:
                return
            for event in state.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    self.streams += 1
                    self.waiting.append(event.stream_id)
            connection.sendall(state.data_to_send())
            if self.streams == 3 and not self.answered:
                self.answered = True
                last = self.waiting[1]
                state.send_headers(last, [(":status", "200")])
                state.send_data(last, b"hello", end_stream=True)
                connection.sendall(state.data_to_send())


def test_an_http2_connection_is_shared_and_not_severed() -> None:
    limiter = tidegate.Limiter(4)
    server = _Http2()
    client = httpx.Client(http1=False, http2=True, timeout=60)

    def ask() -> bytes:
        return client.get(f"http://127.0.0.1:{server.port}/").content

    first = limiter.submit(ask)
    until(lambda: server.streams == 1)
    second = limiter.submit(ask)
    until(lambda: server.streams == 2)
    first.cancel()
    one_is_severed()
    assert first.abandoned and limiter.statistics().severed_total == 0
    third = limiter.submit(ask)
    assert second.result(10) == b"hello" and server.connections == 1
    assert first.abandoned
    server.end()
    until(lambda: first.done() and third.done())
    client.close()
    idle(limiter)


@pytest.fixture
def grpc_server() -> Iterator[tuple[int, threading.Event, list[bool]]]:
    over, seen = threading.Event(), threading.Event()
    gone: list[bool] = []

    def hang(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.set()
        context.add_callback(lambda: gone.append(True))
        over.wait(20)
        return b""

    def hang_stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"one"
        hang(request, context)

    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(hang),
        "Many": grpc.unary_stream_rpc_method_handler(hang_stream),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, seen, gone
    over.set()
    server.stop(0).wait(5)


@pytest.mark.parametrize("kind", ["One", "Many"])
def test_a_grpc_call_is_cancelled(kind: str, grpc_server: tuple[int, threading.Event, list[bool]]) -> None:
    port, seen, gone = grpc_server
    limiter = tidegate.Limiter(1)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def ask() -> None:
            if kind == "One":
                channel.unary_unary("/t.T/One")(b"")
            else:
                list(channel.unary_stream("/t.T/Many")(b""))

        call = limiter.submit(ask)
        assert seen.wait(10)
        call.cancel()
        until(call.done)
        assert isinstance(call.exception(), grpc.RpcError)
        until(lambda: gone)
    idle(limiter)


def test_a_thousand_openai_calls_that_time_out() -> None:
    """Real SDK, its default retries, a server that drips: no thread, socket or slot is left, no retry is sent."""
    count = 1000
    limiter = tidegate.Limiter(8, queue=count)
    with serving("drip") as server:
        client = openai_of(server.url, None)
        ends: list[float] = []
        unstarted = 0  # on a busy machine a call's time can be over before a thread has begun it

        async def one(gate: asyncio.Semaphore) -> None:
            nonlocal unstarted
            async with gate:
                before = len(server.requests)
                task = asyncio.ensure_future(
                    limiter.ask(timeout=0.05, label="chat").run(
                        client.chat.completions.create, model="m", messages=MESSAGES
                    )
                )
                try:
                    await task
                except tidegate.WaitTimeout as late:
                    while not late.call.done():
                        await asyncio.sleep(0.001)
                    assert late.call.ended_at is not None and late.call.abandoned_at is not None
                    ends.append(late.call.ended_at - late.call.abandoned_at)
                except tidegate.QueueTimeout:
                    unstarted += 1
                assert len(server.requests) >= before

        async def main() -> None:
            gate = asyncio.Semaphore(4)
            await asyncio.gather(*(one(gate) for _ in range(count)))

        asyncio.run(main())
        until(lambda: server.active == 0)
        assert len(ends) == count - unstarted and unstarted < count // 10
        assert (
            len(server.requests) <= count
        )  # a call may have been left before its request was sent; none was sent twice
        assert len(server.closed) == len(server.requests)
        assert limiter.threads <= 8
        client.close()
        open_sockets = [path for path in Path("/proc/self/fd").iterdir() if _is_socket_to(path, server.port)]
        assert len(open_sockets) <= 1  # the server's own
        ends.sort()
        print(
            json.dumps(
                {
                    "median_ms": ends[len(ends) // 2] * 1e3,
                    "p99_ms": ends[len(ends) * 99 // 100] * 1e3,
                    "most_ms": ends[-1] * 1e3,
                }
            )
        )
    idle(limiter)
    now = limiter.statistics()
    # A call that was left may have had its slot, and no thread yet.
    assert now.borrowed_tokens == 0 and len(ends) <= now.started == now.finished <= count


def _is_socket_to(path: Path, port: int) -> bool:
    try:
        link = path.readlink()
    except OSError:
        return False
    if not str(link).startswith("socket:"):
        return False
    inode = str(link)[8:-1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] == inode and int(fields[2].split(":")[1], 16) == port:
            return True
    return False
