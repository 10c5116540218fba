from __future__ import annotations

import os
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from real.clients import KEY
from support.fake import Fake
from support.gateway import Direct, Gateway, direct
from support.llama import Llama, Work


@pytest.fixture(scope="session")
def llama() -> Iterator[Llama]:
    with Llama(slots=2) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(llama: Llama) -> Iterator[Gateway | Direct]:
    """The gateway in front of llama.cpp. `TIDEGATE_URL` names one that runs already."""
    if url := os.environ.get("TIDEGATE_URL"):
        yield Direct(url)
    elif direct():
        yield Direct(llama.url)
    else:
        # Asked for usage, llama.cpp moves its timings to the event that is kept from the client: not the same as
        # direct. All its calls are streams, which stop with their connection: no slot has to be kept.
        ways = 'kind = "llama.cpp"\nask_usage = false\nsettle = "0s"\nslots = 2\nqueue = 16\n'
        upstream = f'[[upstreams]]\nurl = "{llama.url}"\n{ways}'
        with Gateway(config=upstream) as server:
            yield server


@pytest.fixture(scope="session")
def fake() -> Iterator[Fake]:
    """The scripted model server."""
    with Fake() as server:
        yield server


@pytest.fixture(scope="session")
def front(fake: Fake) -> Iterator[Gateway]:
    """The gateway in front of it."""
    with Gateway("--upstream", fake.url, "--slots", "64", "--queue", "64") as server:
        yield server


@pytest.fixture(scope="session")
def joined(fake: Fake) -> Iterator[Gateway]:
    """The gateway in front of it, where answers in one piece are put together from streams."""
    upstream = f'[[upstreams]]\nurl = "{fake.url}"\nkind = "vllm"\nask_stream = true\n'
    with Gateway(config=upstream) as server:
        yield server


@pytest.fixture
def work(llama: Llama) -> Work:
    """What llama.cpp does from here on."""
    return llama.work()


@pytest.fixture
def chat(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        yield client


@pytest.fixture
def http_direct(llama: Llama) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=llama.url, timeout=30) as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if direct():
        for item in items:
            if item.get_closest_marker("gateway"):
                item.add_marker(pytest.mark.skip(reason="no gateway: TIDEGATE_BIN=direct"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A failed test shows the end of the log of each server that it used."""
    report = (yield).get_result()
    if report.when == "call" and report.failed:
        for name, value in item.funcargs.items():
            if hasattr(value, "tail"):
                report.sections.append((f"end of the log of {name}", value.tail()))
