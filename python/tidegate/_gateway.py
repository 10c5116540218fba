"""With a Tidegate gateway in front: each request of a call carries a number, and the gateway is told when the call is
left. Closing the connection tells it too; this reaches it through whatever stands between, and where the socket cannot
be severed."""

from __future__ import annotations

import http.client
import itertools
import logging
import secrets
import sys
import threading
from collections.abc import Callable
from functools import wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from tidegate._call import Call

HEADER = "x-tidegate-call"
PATIENCE = 5.0
"""How long the gateway may take to hear it, in seconds."""
KEYS = ("authorization", "x-api-key", "api-key")
"""What says whose call it is: the gateway lets nobody else cancel it."""

log = logging.getLogger("tidegate")
_process = secrets.token_hex(8)
_numbers = itertools.count(1)
_patched: set[str] = set()
_lock = threading.RLock()  # as the collector of garbage can make a call leave in any line


def forked() -> None:
    """In the child of a fork, where whoever held the lock is not."""
    global _lock
    _lock = threading.RLock()


class Gateway:
    """The gateway of one limiter."""

    def __init__(self, url: str) -> None:
        self.base = _base(url)
        self._prefix = self.base.path.rstrip("/").removesuffix("/v1")
        self._left: SimpleQueue[tuple[str, dict[str, str]]] | None = None

    def is_for(self, url: str) -> bool:
        """Whether a request goes to it."""
        to = urlsplit(url)
        return (to.scheme, to.hostname, _port(to)) == (self.base.scheme, self.base.hostname, _port(self.base))

    def tell(self, requests: list[tuple[str, dict[str, str]]]) -> None:
        """These requests are waited for by nobody. Said from a thread of its own."""
        with _lock:
            if self._left is None:
                self._left = SimpleQueue()
                threading.Thread(target=self._run, args=(self._left,), name="tidegate-gateway", daemon=True).start()
        for one in requests:
            self._left.put(one)

    def forked(self) -> None:
        """In the child of a fork, where its thread is not."""
        self._left = None

    def _run(self, left: SimpleQueue[tuple[str, dict[str, str]]]) -> None:
        while True:
            number, keys = left.get()
            try:
                status = self._cancel(number, keys)
                if status >= 400 and status != 404:  # 404: it had ended
                    log.warning("the gateway at %s did not cancel call %s: %s", self.base.geturl(), number, status)
            except (OSError, http.client.HTTPException) as error:
                log.warning("the gateway at %s could not be told to cancel: %s", self.base.geturl(), error)

    def _cancel(self, number: str, keys: dict[str, str]) -> int:
        kind = http.client.HTTPSConnection if self.base.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.base.hostname or "", self.base.port, timeout=PATIENCE)
        try:
            path = f"{self._prefix}/v1/calls/{number}/cancel"
            connection.request("POST", path, headers={**keys, "content-length": "0"})
            return connection.getresponse().status
        finally:
            connection.close()


def _base(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise TypeError(f"gateway must be a URL, not {url!r}")
    base = urlsplit(url)
    if base.scheme not in ("http", "https") or not base.hostname:
        raise ValueError(f"gateway must be a URL like http://127.0.0.1:8080, not {url!r}")
    return base


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def mark(url: str, headers: Any) -> None:
    """Gives a request that the running call is about to send its number."""
    from tidegate._call import current

    call = current.get()
    if call is None or (gateway := call.limiter.gateway) is None or call.left or not gateway.is_for(url):
        return
    number = f"{_process}-{next(_numbers)}"
    headers[HEADER] = number
    keys = {name.lower(): _text(value) for name, value in headers.items() if _text(name).lower() in KEYS}
    call.requests.append((number, keys))


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def patch() -> None:
    """Has the clients of httpx, httpx2 and urllib3 (requests, boto3) mark their requests, once each is loaded."""
    for module, name, method, marking in _CLIENTS:
        if module in _patched or module not in sys.modules:
            continue
        with _lock:
            kind: Any = getattr(sys.modules[module], name, None)
            if kind is None or module in _patched:
                continue  # being loaded
            setattr(kind, method, marking(getattr(kind, method)))
            _patched.add(module)


def _marking_send(send: Callable[..., Any]) -> Callable[..., Any]:
    """`Client.send` of httpx."""

    @wraps(send)
    def marked(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        mark(str(request.url), request.headers)
        return send(self, request, *args, **kwargs)

    return marked


def _marking_urlopen(urlopen: Callable[..., Any]) -> Callable[..., Any]:
    """`HTTPConnectionPool.urlopen` of urllib3, to which requests and botocore give what they have prepared, and signed:
    a header that comes later is no part of the signature."""

    @wraps(urlopen)
    def marked(
        self: Any, method: Any, url: Any, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        given = self.headers if headers is None else headers
        headers = given.copy() if hasattr(given, "copy") else dict(given)
        # A whole URL is what a proxy gets.
        mark(url if "://" in url else f"{self.scheme}://{_in_url(self.host)}:{self.port or ''}", headers)
        return urlopen(self, method, url, body, headers, *args, **kwargs)

    return marked


def _in_url(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host


_CLIENTS = (
    ("httpx", "Client", "send", _marking_send),
    ("httpx2", "Client", "send", _marking_send),
    ("urllib3", "HTTPConnectionPool", "urlopen", _marking_urlopen),
)


def left(call: Call[Any]) -> None:
    """The waiter has gone: the gateway is told of what the call has asked of it."""
    gateway = call.limiter.gateway
    if gateway is not None and call.requests:
        gateway.tell(list(call.requests))
