"""What calls leave behind: nothing, however many there were, whoever made them and however they ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake import Fake
from support.gateway import Gateway
from support.process import until

pytestmark = pytest.mark.gateway

CALLS = int(os.environ.get("LEFTOVER_CALLS", "100000"))
KEYS = 1000
LANES = 3
CHUNKS = 100_000


@pytest.fixture(scope="module")
def keyed(fake: Fake) -> Iterator[Gateway]:
    """Knows every second of the keys."""
    keys = "".join(f'[[keys]]\nname = "k{n}"\nkey = "sk-{n}-{n}"\n' for n in range(0, KEYS, 2))
    with Gateway(config=f'{keys}[[upstreams]]\nurl = "{fake.url}"\nslots = 64\nqueue = 64\n') as gateway:
        yield gateway


def request(number: int, rig: dict, *, stream: bool) -> bytes:
    body = {"model": "fake", "user": f"user-{number}", "messages": [], "stream": stream, "rig": rig}
    text = json.dumps(body).encode()
    key = number % KEYS
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer sk-%d-%d\r\nx-request-id: req-%d\r\ncontent-length: %d\r\n\r\n"
        % (key, key, number, len(text))
        + text
    )


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def answered(client: socket.socket) -> None:
    """Reads an answer of known length."""
    got = b""
    while b"\r\n\r\n" not in got:
        more = client.recv(65536)
        assert more, "closed"
        got += more
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)


def lane(url: str, first: int, last: int) -> None:
    """Three of ten calls leave in mid-stream, half of the keys are wrong, and each call has names of its own."""
    kept = connected(url)
    whole = {"tokens": 1, "framing": "length"}
    for number in range(first, last):
        if number % 10 < 3:
            leaves = connected(url)
            leaves.sendall(request(number, {"end": "never", "pace_ms": 5}, stream=True))
            assert leaves.recv(65536)
            leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaves.close()
        else:
            kept.sendall(request(number, whole, stream=False))
            answered(kept)


def calls(gateway: Gateway, first: int, last: int) -> None:
    fork = multiprocessing.get_context("fork")
    edges = [first + (last - first) * n // LANES for n in range(LANES + 1)]
    lanes = [fork.Process(target=lane, args=(gateway.url, *edges[n : n + 2])) for n in range(LANES)]
    for process in lanes:
        process.start()
    for process in lanes:
        process.join()
    assert [process.exitcode for process in lanes] == [0] * LANES


def resident(gateway: Gateway) -> int:
    """Bytes of memory that it has, when nothing runs."""
    until(lambda: gateway.metric("tidegate_running") == 0, 10, "nothing runs")
    pages = Path(f"/proc/{gateway.child.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def processor_ns(gateway: Gateway) -> int:
    tasks = Path(f"/proc/{gateway.child.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def series(gateway: Gateway) -> int:
    return len(gateway.metrics())


@pytest.mark.timeout(300)
def test_c95_memory_does_not_grow_with_calls(keyed: Gateway):
    """As much after all of them as after the first tenth; `LEFTOVER_CALLS=1000000` for as many as in the case."""
    tenth = CALLS // 10
    calls(keyed, 0, tenth)
    before, names = resident(keyed), series(keyed)
    calls(keyed, tenth, CALLS)
    after = resident(keyed)
    print(f"{before} bytes after {tenth} calls, {after} after {CALLS}")
    assert after <= before * 1.1, f"{before} bytes after {tenth} calls, {after} after {CALLS}"
    assert series(keyed) <= names * 1.1
    assert keyed.metric("tidegate_calls_total") == CALLS, "each was counted once"


def test_c95_a_chunk_costs_the_same_at_the_end_of_a_long_stream(keyed: Gateway):
    """With the access log on; the text is not gathered, so its length has no price."""
    client = connected(keyed.url)
    client.sendall(request(2, {"tokens": CHUNKS, "pace_ms": 0}, stream=True))
    read, start = client.makefile("rb"), processor_ns(keyed)
    chunks, spent = 0, []
    for line in read:
        if line.startswith(b"data: {"):
            chunks += 1
            if chunks in (CHUNKS // 2, CHUNKS):
                spent.append(processor_ns(keyed) - start)
        if line.startswith(b"data: [DONE]"):
            break
    assert chunks >= CHUNKS
    first, both = spent
    print(f"{first} ns for the first half, {both - first} for the second")
    assert both - first <= 1.5 * first, f"{first} ns for the first half, {both - first} for the second"
