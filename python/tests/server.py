"""A model server on loopback that never ends by itself: it drips, hangs or refuses, and notes who has left."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

JSON_ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"hello"}}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Waits for a condition, and fails when it does not come."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {condition}")
        time.sleep(0.001)
    return value


class Server:
    """`modes` are used up one a request, the last one stays:

    answer: a whole chat completion. drip: a whole answer, a byte every 10 ms, without end. events: an event stream
    without end. three: an event stream of three events. hang: nothing. error: 500. part: a head and nothing more."""

    def __init__(self, *modes: str, tls: ssl.SSLContext | None = None) -> None:
        self.modes = list(modes) or ["answer"]
        self.requests: list[bytes] = []
        self.began: list[float] = []
        self.closed: list[float] = []
        self.active = 0
        self.connections = 0
        self._lock = threading.Lock()
        self._tls = tls
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://localhost:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self.connections += 1
        with contextlib.suppress(OSError), connection:
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                while (head := self._request(connection)) is not None:
                    with self._lock:
                        self.requests.append(head)
                        self.began.append(time.monotonic())
                        self.active += 1
                        mode = self.modes.pop(0) if len(self.modes) > 1 else self.modes[0]
                    try:
                        getattr(self, f"_{mode}")(connection)
                    finally:
                        with self._lock:
                            self.active -= 1

    def _request(self, connection: socket.socket) -> bytes | None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
            if line.lower().startswith(b"expect:"):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(body) < length:
            body += connection.recv(65536)
        return head

    # --- the modes ---

    def _answer(self, connection: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(JSON_ANSWER) + JSON_ANSWER)

    def _error(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 500 no\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    def _hang(self, connection: socket.socket) -> None:
        self._until_gone(connection)

    def _part(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n{")
        self._until_gone(connection)

    def _drip(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n")
        self._until_gone(connection, b" ")

    def _events(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        self._until_gone(connection, EVENT)

    def _three(self, connection: socket.socket) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            + EVENT * 3
            + b"data: [DONE]\n\n"
        )
        connection.close()

    def _until_gone(self, connection: socket.socket, drop: bytes = b"") -> None:
        """Until the client has closed, with `drop` every 10 ms."""
        connection.settimeout(0.01)
        try:
            while not self._over.is_set():
                try:
                    if connection.recv(1) == b"":
                        break
                except (TimeoutError, ssl.SSLWantReadError):
                    if drop:
                        connection.settimeout(5)
                        connection.sendall(drop)
                        connection.settimeout(0.01)
        except OSError:
            pass
        with self._lock:
            self.closed.append(time.monotonic())
        with contextlib.suppress(OSError):
            connection.close()
        raise OSError("over")


@contextlib.contextmanager
def serving(*modes: str, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(*modes, tls=tls)
    try:
        yield server
    finally:
        server.close()
