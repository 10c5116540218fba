"""Clients that leave as they are told: HTTP/1.1 and HTTP/2 over TLS, by FIN, by RST or by a cancelled stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import struct
import subprocess
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions

PATIENCE = 100
"""Seconds that a read may take; more than the longest silence of a test."""

RESET = struct.pack("ii", 1, 0)


class Broken(Exception):
    """The answer ended, and not as HTTP says that a complete one does."""


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and its self-signed certificate for this machine."""
    key, crt = folder / "tls.key", folder / "tls.crt"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(crt)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return key, crt


def connect(port: int, crt: Path, protocol: str) -> ssl.SSLSocket:
    """A TLS connection whose server agreed to speak `protocol` (an ALPN name)."""
    context = ssl.create_default_context(cafile=str(crt))
    context.set_alpn_protocols([protocol])
    tcp = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return context.wrap_socket(tcp, server_hostname="localhost")
    except (OSError, ValueError):
        tcp.close()
        raise


class Answer:
    """One call and its answer. `status` and `headers` are there after `head()`."""

    status: int
    headers: dict[str, str]
    sock: ssl.SSLSocket
    _rest = b""

    def head(self) -> Answer:
        raise NotImplementedError

    def read(self) -> bytes:
        """Some bytes of the body; none at its clean end; `Broken` at any other."""
        raise NotImplementedError

    def body(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def json(self) -> Any:
        return json.loads(self.body())

    def event(self) -> str:
        """The next event that is no comment; empty at the clean end of the body."""
        while True:
            while b"\n\n" not in self._rest:
                if not (more := self.read()):
                    return ""
                self._rest += more
            event, _, self._rest = self._rest.partition(b"\n\n")
            if not event.startswith(b":"):
                return event.decode()

    def events(self) -> list[str]:
        return list(iter(self.event, ""))

    def leave(self, way: str) -> None:
        """`fin`, `rst`; HTTP/2 has `cancel` too."""
        if way == "fin":
            self.sock.shutdown(socket.SHUT_WR)
        else:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Http1(Answer):
    WAYS = ("fin", "rst")

    def __init__(self, port: int, crt: Path, method: str, path: str, body: bytes, headers: dict[str, str]):
        self.sock = connect(port, crt, "http/1.1")
        self._connection = http.client.HTTPConnection("localhost")
        self._connection.sock = self.sock
        self._response: http.client.HTTPResponse | None = None
        self._connection.request(method, path, body, headers | {"host": "localhost"})

    def head(self) -> Answer:
        try:
            self._response = self._connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            raise Broken(repr(error)) from error
        self.status = self._response.status
        self.headers = {name.lower(): value for name, value in self._response.getheaders()}
        return self

    def read(self) -> bytes:
        try:
            some = self._response.read1(65536)
        except TimeoutError:
            raise
        except (http.client.HTTPException, OSError) as error:
            raise Broken(repr(error)) from error
        if not some and self._response.length:
            raise Broken(f"{self._response.length} bytes are missing")
        return some

    def close(self) -> None:
        if self._response:
            self._response.close()
        super().close()


class Http2(Answer):
    WAYS = ("cancel", "fin", "rst")

    def __init__(self, port: int, crt: Path, method: str, path: str, body: bytes, headers: dict[str, str]):
        self.sock = connect(port, crt, "h2")
        if self.sock.selected_alpn_protocol() != "h2":
            self.sock.close()
            raise Broken("the server does not speak HTTP/2")
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._seen: list[Any] = []
        self._partial = b""
        fields = [(":method", method), (":path", path), (":scheme", "https"), (":authority", "localhost")]
        self._h2.send_headers(1, fields + list(headers.items()), end_stream=not body)
        while body:
            room = min(self._h2.local_flow_control_window(1), self._h2.max_outbound_frame_size, len(body))
            self._h2.send_data(1, body[:room], end_stream=room == len(body)) if room else self._receive()
            body = body[room:]
            self._flush()
        self._flush()

    def _flush(self) -> None:
        self.sock.sendall(self._h2.data_to_send())

    def _receive(self) -> None:
        self._flush()
        try:
            data = self.sock.recv(65536)
        except TimeoutError:
            raise
        except OSError as error:
            raise Broken(repr(error)) from error
        if not data:
            raise Broken("the connection ended")
        self._seen += self._h2.receive_data(self._without_farewell(data))
        self._flush()

    def _without_farewell(self, data: bytes) -> bytes:
        """Whole frames, less a GOAWAY without an error: it asks for no new streams only; `h2` ends all."""
        self._partial += data
        whole = b""
        while len(self._partial) >= 9:
            size = 9 + int.from_bytes(self._partial[:3])
            if len(self._partial) < size:
                break
            frame, self._partial = self._partial[:size], self._partial[size:]
            if frame[3] != 7 or int.from_bytes(frame[13:17]):
                whole += frame
        return whole

    def _next(self, *kinds: type) -> Any:
        while True:
            while self._seen:
                event = self._seen.pop(0)
                if isinstance(event, kinds):
                    return event
                if isinstance(event, h2.events.StreamReset):
                    raise Broken(repr(event))
                if isinstance(event, h2.events.ConnectionTerminated):
                    raise Broken(repr(event))
            self._receive()

    def head(self) -> Answer:
        fields = dict(self._next(h2.events.ResponseReceived).headers)
        self.status = int(fields[":status"])
        self.headers = fields
        return self

    def read(self) -> bytes:
        while True:
            event = self._next(h2.events.DataReceived, h2.events.StreamEnded)
            if isinstance(event, h2.events.StreamEnded):
                return b""
            self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
            self._flush()
            if event.data:
                return event.data

    def leave(self, way: str) -> None:
        if way != "cancel":
            return super().leave(way)
        self._h2.reset_stream(1, error_code=8)
        with contextlib.suppress(OSError):
            self._flush()
        return None


VERSIONS: dict[str, type[Http1 | Http2]] = {"HTTP/1.1": Http1, "HTTP/2": Http2}
