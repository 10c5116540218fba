"""vLLM behind the gateway: the same answers, and no work that nobody waits for."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from support.gateway import Gateway, binary, direct
from support.process import until
from support.vllm import ENDLESS, Vllm, Work

MESSAGES = [{"role": "user", "content": "tell me"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "seed": 7, "ignore_eos": True}
PATHS = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {**CHAT, "prompt": "tell me", "messages": None}),
    "messages": ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "temperature": 0}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "tell me", "temperature": 0}),
}


def call(path: str, tokens: int, **more: object) -> dict:
    body = {key: value for key, value in PATHS[path][1].items() if value is not None}
    return body | {"max_output_tokens" if path == "responses" else "max_tokens": tokens} | more


def steady(text: str) -> str:
    """Without ids and times."""
    text = re.sub(r'"(chatcmpl|cmpl|msg|resp|rs|item)[-_][^"]*"', '"id"', text)
    return re.sub(r'"(created|created_at|completed_at)":\s*[\d.]+', '"time":0', text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_same_as_direct(path: str, stream: bool, gateway: Gateway, vllm: Vllm):
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = call(path, 20, stream=stream, **usage)
    through, plain = (httpx.post(server.url + PATHS[path][0], json=body, timeout=60) for server in (gateway, vllm))
    assert through.status_code == plain.status_code == 200, through.text
    assert steady(through.text) == steady(plain.text)


LOGPROBS = {"chat": {"logprobs": True, "top_logprobs": 2}, "completions": {"logprobs": 2}}
WHOLE = {
    "chat": ("chat", {}),
    "chat, log probabilities": ("chat", LOGPROBS["chat"]),
    "chat, several choices": ("chat", {"n": 2, "temperature": 1}),
    "chat, token ids": ("chat", {"return_token_ids": True}),
    "chat, stop": ("chat", {"stop_token_ids": list(range(100, 400))}),
    "chat, unicode": ("chat", {"messages": [{"role": "user", "content": "日本語 \u2028 🙂"}]}),
    "completions": ("completions", {}),
    "completions, log probabilities": ("completions", LOGPROBS["completions"]),
    "completions, several prompts": ("completions", {"prompt": ["once upon", "a time"]}),
    "completions, echo": ("completions", {"echo": True}),
    "messages": ("messages", {}),
    "responses": ("responses", {}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_answer_byte_for_byte(case: str, gateway: Gateway, vllm: Vllm):
    """Asked for as a stream and put together; the ids and times differ from call to call."""
    path, more = WHOLE[case]
    body = call(path, 16, **more)
    through, plain = (httpx.post(server.url + PATHS[path][0], json=body, timeout=60) for server in (gateway, vllm))
    assert through.status_code == plain.status_code == 200, through.text
    assert steady(through.text) == steady(plain.text)
    assert through.headers["content-type"] == plain.headers["content-type"]


@pytest.mark.skipif(direct(), reason="the probe is the gateway's")
def test_the_probe_tells_what_vllm_does(vllm: Vllm, note: Callable):
    command = [str(binary()), "probe", vllm.url, "--json", "--at-once", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    verdicts = {finding["id"]: finding["verdict"] for finding in found["findings"]}
    note(probe={finding["id"]: finding["answer"] for finding in found["findings"]}, seconds=found["seconds"])
    assert found["kind"] == "vllm"
    assert found["calls_at_once"] == 8, "--max-num-seqs"
    for left in ("stream", "whole", "whole_beside"):
        assert verdicts[left] in ("stops", "stops_late"), "late: on a busy machine"
    assert verdicts["prefill"] in ("stops", "stops_late"), "with the step that runs"
    assert verdicts["queued"] == "forgotten"
    assert verdicts["queue"] == "no_bound_seen"
    assert verdicts["usage"] == "on_the_way"
    assert verdicts["idle"] == "closes"
    assert 'on_abandon = "cancel"' in found["config"]
    assert '# abandon.confirm = "vllm-metrics"' in found["config"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["messages", "responses"])
def test_other_dialects(path: str, stream: bool, gateway: Gateway):
    """The random model ends when it likes: the shape counts."""
    answer = httpx.post(gateway.url + PATHS[path][0], json=call(path, 20, stream=stream), timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        end = "message_stop" if path == "messages" else "response.completed"
        assert f"event: {end}" in answer.text or "event: response.incomplete" in answer.text
    else:
        assert answer.json()["usage"]["output_tokens"] > 0


def test_errors_pass(gateway: Gateway, vllm: Vllm):
    too_long = call("chat", 5, messages=[{"role": "user", "content": "word " * 30_000}])
    unknown = call("chat", 5, model="huge")
    for body in (too_long, unknown):
        through, plain = (
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60) for server in (gateway, vllm)
        )
        assert through.status_code == plain.status_code
        assert through.json()["error"]["message"]
        assert through.json() == plain.json()


# --- leaving ------------------------------------------------------------------------------------------------------


def connect(gateway: Gateway, path: str, body: dict) -> socket.socket:
    url = httpx.URL(gateway.url)
    content = json.dumps(body).encode()
    head = f"POST {PATHS[path][0]} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    peer = socket.create_connection((url.host, url.port), timeout=60)
    peer.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return peer


def fin(peer: socket.socket) -> None:
    peer.close()


def rst(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def half_close(peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [fin, rst, half_close])
@pytest.mark.parametrize("path", PATHS)
def test_leave_a_stream(path: str, leave: Callable, gateway: Gateway, work: Work, note: Callable):
    with connect(gateway, path, call(path, ENDLESS, stream=True, ignore_eos=True)) as peer:
        received = b""
        while received.count(b"data:") < 5:
            received += peer.recv(65536)
        leave(peer)
        note(seconds_to_abort=work.wait_aborted(within=5), tokens=work.tokens())
        assert work.tokens() < ENDLESS / 4


@pytest.mark.parametrize("leave", [fin, rst, half_close])
def test_leave_a_whole_answer(leave: Callable, gateway: Gateway, work: Work, note: Callable):
    with connect(gateway, "chat", call("chat", ENDLESS)) as peer:
        work.wait_added()
        until(lambda: work.tokens() > 0, 10, "it decodes", every=0.05)
        leave(peer)
        note(seconds_to_abort=work.wait_aborted(within=5), tokens=work.tokens())
        assert work.tokens() < ENDLESS / 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leave_in_prefill(stream: bool, gateway: Gateway, vllm: Vllm, work: Work, note: Callable):
    """vLLM ends the running step, at most `max_num_batched_tokens` of the prompt."""
    words = " ".join(f"word{number % 97}" for number in range(3500))
    prompt = [{"role": "user", "content": f"{stream} {words}"}]
    with connect(gateway, "chat", call("chat", ENDLESS, messages=prompt, stream=stream)) as peer:
        work.wait_added()
        fin(peer)
        note(seconds_to_abort=work.wait_aborted(within=30), tokens=work.tokens())
        assert work.tokens() <= 2
    # The running step holds the next call up; that is all that is left of the prefill.
    begin = time.monotonic()
    httpx.post(f"{vllm.url}/v1/chat/completions", json=call("chat", 1), timeout=60).raise_for_status()
    note(seconds_for_the_next=round(time.monotonic() - begin, 3))


@pytest.mark.skipif(direct(), reason="the queue is the gateway's")
def test_leave_the_queue(vllm: Vllm, work: Work, note: Callable):
    """vLLM never hears of a call that was left while it waited for a slot."""
    with Gateway("--upstream", vllm.url, "--slots", "1", "--queue", "4") as narrow:
        with connect(narrow, "chat", call("chat", ENDLESS, stream=True)) as first:
            assert first.recv(1)
            second = connect(narrow, "chat", call("chat", 5, stream=True))
            until(lambda: narrow.metric("tidegate_queued") == 1, 5, "the second waits")
            second.close()
            until(lambda: narrow.metric("tidegate_queued") == 0, 5, "the queue is empty")
        work.wait_aborted(within=5)
        begin = time.monotonic()
        httpx.post(f"{narrow.url}/v1/chat/completions", json=call("chat", 5), timeout=30).raise_for_status()
        note(requests_that_reached_vllm=work.added(), seconds_for_the_next=round(time.monotonic() - begin, 3))
    assert work.added() == 2


def test_a_crowd_leaves(gateway: Gateway, vllm: Vllm, work: Work, note: Callable):
    peers = [connect(gateway, "chat", call("chat", ENDLESS, stream=True)) for _ in range(8)]
    for peer in peers:
        assert peer.recv(1)
    for number, peer in enumerate(peers):
        (rst if number % 2 else fin)(peer)
    begin = time.monotonic()
    until(lambda: work.aborted() >= len(peers) and vllm.running() == 0, 10, "all are aborted", every=0.05)
    note(seconds_to_abort_all=round(time.monotonic() - begin, 3), calls=len(peers), tokens=work.tokens())


# --- the slot goes by vLLM's own count ------------------------------------------------------------------------------

# Without the count a slot would be kept for an hour.
CONFIRM = """
[[upstreams]]
url = "{url}"
kind = "vllm"
slots = {slots}
queue = 100
on_abandon = "linger"
abandon.time = "1h"
abandon.confirm = "vllm-metrics"
abandon.confirm_within = "1m"
ask_stream = true
"""


class Most:
    """The most requests that vLLM says it had in hand at once, looked at all the time."""

    def __init__(self, vllm: Vllm):
        self._vllm, self._over = vllm, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen, self.looks = 0.0, 0

    def _look(self) -> None:
        while not self._over.is_set():
            running, waiting = (self._vllm.metric(f"vllm:num_requests_{what}") for what in ("running", "waiting"))
            self.seen, self.looks = max(self.seen, running + waiting), self.looks + 1

    def __enter__(self) -> Most:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.skipif(direct(), reason="slots are the gateway's")
def test_the_slot_is_back_when_vllm_shows_that_it_stopped(vllm: Vllm, note: Callable):
    with Gateway(config=CONFIRM.format(url=vllm.url, slots=2)) as gateway:
        for leave in (fin, rst, half_close):
            work = vllm.work()
            with connect(gateway, "chat", call("chat", ENDLESS, stream=True)) as peer:
                received = b""
                while received.count(b"data:") < 60:
                    received += peer.recv(65536)
                leave(peer)
                work.wait_aborted(within=10)
                gateway.wait_metric(0, "tidegate_lingering", within=15)

        def ended() -> list[dict]:
            """The lines are gathered for a moment before they are written."""
            lines = [json.loads(line) for line in gateway.log().splitlines() if line.startswith("{")]
            return lines if len(lines) == 3 else []

        lines = until(ended, 5, "a line for each call")
        assert [line["end_known"] for line in lines] == ["confirmed"] * 3, lines
        assert all(line["slot_kept_ms"] < 10_000 for line in lines), lines
        note(slot_kept_ms=[round(line["slot_kept_ms"]) for line in lines])
        assert gateway.metric("tidegate_confirm_polls_total", result="read") >= 3


@pytest.mark.skipif(direct(), reason="slots are the gateway's")
def test_never_more_than_the_slots_by_vllms_own_count(vllm: Vllm, note: Callable):
    """Thirty clients that mostly leave, streams and whole answers, on three slots."""
    slots = 3
    with Gateway(config=CONFIRM.format(url=vllm.url, slots=slots)) as gateway, Most(vllm) as most:

        def client(number: int) -> None:
            for turn in range(2):
                stays = (number + turn) % 3 == 0
                body = call("chat", 30 if stays else 400, stream=number % 2 == 0)
                with connect(gateway, "chat", body) as peer:
                    received = b""
                    # A whole answer is left by the clock, a stream after some of its events.
                    peer.settimeout(120 if stays or number % 2 == 0 else 3)
                    with suppress(TimeoutError):
                        while piece := peer.recv(65536):
                            received += piece
                            if received.endswith(b"0\r\n\r\n") or (not stays and received.count(b"data:") > 25):
                                break
                            if number % 2 and b"\r\n\r\n" in received and received.rstrip().endswith(b"}"):
                                break
                    (rst if number % 4 < 2 else fin)(peer)

        with concurrent.futures.ThreadPoolExecutor(30) as crowd:
            list(crowd.map(client, range(30)))
        gateway.wait_metric(0, "tidegate_running", within=60)
        known = {
            how: gateway.metric("tidegate_confirmations_total", result=how)
            for how in ("confirmed", "late", "given_up", "settled")
        }
        note(most_in_vllm=most.seen, looks=most.looks, known=known)
    assert most.seen <= slots
    assert most.looks > 10
    assert known["confirmed"] + known["late"] > 5, known
    assert known["given_up"] == 0


@pytest.mark.skipif(direct(), reason="the grace is the gateway's")
def test_a_retry_that_attaches_keeps_one_slot_and_one_request(vllm: Vllm, note: Callable):
    config = CONFIRM.format(url=vllm.url, slots=1) + 'attach.grace = "20s"\n'
    key = {"idempotency-key": "one-call-of-a-person-that-comes-back"}
    # Long: the client shares its interpreter with a busy watcher, and must have left before all of it has come.
    body = call("chat", 2000, stream=True)
    with Gateway(config=config) as gateway, Most(vllm) as most:
        work = vllm.work()
        url = f"{gateway.url}/v1/chat/completions"
        first: list[str] = []
        with httpx.stream("POST", url, json=body, headers=key, timeout=60) as answer:
            for line in answer.iter_lines():
                first += [line] if line.startswith("data:") else []
                if len(first) == 40:
                    break
        gateway.wait_metric(1, "tidegate_abandoned", within=5)
        with httpx.stream("POST", url, json=body, headers=key, timeout=60) as answer:
            attached = answer.headers["x-tidegate-attached"]
            lines = [line for line in answer.iter_lines() if line.startswith("data:")]
        assert lines[:40] == first
        assert lines[-1] == "data: [DONE]"
        assert work.added() == 1, "vLLM had it once"
        assert gateway.access(attached)["end_known"] == "seen"
        # Nobody comes back to this one: closed after the grace, and its slot goes by the count.
        endless = call("chat", ENDLESS, stream=True)
        with httpx.stream(
            "POST", url, json=endless, headers={"idempotency-key": "nobody-comes-back-to-this"}
        ) as answer:
            left = answer.headers.get("x-tidegate-id") or answer.headers["x-request-id"]
            for _ in zip(range(60), answer.iter_lines(), strict=False):
                pass
        gateway.wait_metric(0, "tidegate_running", within=60)
        line = gateway.access(left)
        assert (line["overrun"], line["end_known"]) == ("grace", "confirmed"), line
        note(most_in_vllm=most.seen, slot_kept_ms=round(line["slot_kept_ms"]), events=len(lines))
    assert most.seen <= 1
