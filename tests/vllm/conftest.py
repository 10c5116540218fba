from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.gateway import Direct, Gateway, direct
from support.process import CACHE
from support.vllm import Vllm, Work

seen: dict[str, object] = {}


@pytest.fixture(scope="session")
def vllm() -> Iterator[Vllm]:
    with Vllm() as server:
        # The first request compiles what is not compiled yet.
        body = {"model": "tiny", "prompt": "warm", "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status()
        yield server


@pytest.fixture(scope="session")
def gateway(vllm: Vllm) -> Iterator[Gateway | Direct]:
    if direct():
        yield Direct(vllm.url)
    else:
        ways = 'kind = "vllm"\nsettle = "0s"\nslots = 8\nqueue = 8\n'
        with Gateway(config=f'[[upstreams]]\nurl = "{vllm.url}"\n{ways}') as server:
            yield server


@pytest.fixture
def work(vllm: Vllm) -> Work:
    return vllm.work()


@pytest.fixture
def note(request: pytest.FixtureRequest):
    """`note(what=value)`: goes into the report under the test's name."""

    def write(**facts: object) -> None:
        seen.setdefault(request.node.name, {}).update(facts)

    return write


def pytest_sessionfinish(session: pytest.Session) -> None:
    if seen:
        report = Path(os.environ.get("VLLM_REPORT", CACHE / "vllm-seen.json"))
        through = "vLLM itself" if direct() else "the gateway"
        facts = {"through": through, "failed": session.testsfailed, "seen": seen}
        report.write_text(json.dumps(facts, indent=2) + "\n")
