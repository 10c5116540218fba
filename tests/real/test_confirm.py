"""The end of abandoned work by llama.cpp's own count of its slots at work."""

from __future__ import annotations

import httpx
import pytest

from real.clients import PROMPT
from support.gateway import Gateway
from support.llama import ENDLESS, Llama

pytestmark = pytest.mark.gateway

# Without the count the slot would be kept for an hour.
CONFIG = """
[[upstreams]]
url = "{url}"
kind = "llama.cpp"
slots = 2
on_abandon = "linger"
abandon.time = "1h"
abandon.confirm = "llama-slots"
"""


def test_the_slot_is_back_when_llama_cpp_shows_that_it_stopped(llama: Llama):
    with Gateway(config=CONFIG.format(url=llama.url)) as gateway:
        work = llama.work()
        body = {"model": "tiny", "messages": PROMPT, "max_tokens": ENDLESS, "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=30) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data:"))
            for _ in zip(range(20), events, strict=False):
                pass
        work.wait_stopped()
        line = gateway.access(answer.headers["x-request-id"])
        assert line["end_known"] == "confirmed", line
        assert line["slot_kept_ms"] < 5000, line
        assert llama.busy() == 0
        gateway.wait_metric(0, "tidegate_lingering")
        assert gateway.metric("tidegate_confirmations_total", result="confirmed") == 1
        assert gateway.metric("tidegate_confirm_polls_total", result="read") >= 1


def test_while_it_reads_a_prompt_for_nobody_its_slot_is_kept(llama: Llama):
    """A call without a token is seen to end by two polls with a free slot, in more than the second in which llama.cpp
    looks for its client."""
    with Gateway(config=CONFIG.format(url=llama.url)) as gateway:
        work = llama.work()
        prompt = [{"role": "user", "content": "one two three four five six " * 1500}]
        body = {"model": "tiny", "messages": prompt, "max_tokens": ENDLESS, "stream": True}
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=0.3)
        work.wait_launched()
        gateway.wait_metric(1, "tidegate_lingering")
        work.wait_stopped(within=60)
        gateway.wait_metric(0, "tidegate_lingering", within=15)
        assert gateway.metric("tidegate_confirmations_total", result="confirmed") == 1
        assert llama.busy() == 0
