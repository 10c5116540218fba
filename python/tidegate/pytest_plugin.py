"""A fixture for pytest that fails a test which leaves work running: `no_leftovers`. For every test at once, in the
configuration: `tidegate_no_leftovers = true`.

It gives the work of the test's calls two seconds to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidegate._call import Call

GRACE = 2.0
"""How long the work of a test may take to end after it, in seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("tidegate_no_leftovers", "each test fails that leaves calls of a limiter running", "bool", False)


def _running() -> dict[int, Call[Any]]:
    from tidegate._limiter import limiters

    return {call.number: call for limiter in limiters() for call in limiter.statistics().borrowers}


def _leftovers(before: dict[int, Call[Any]]) -> str:
    from tidegate._limiter import limiters

    end = time.monotonic() + GRACE
    while left := _running().keys() - before.keys():
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    if not left:
        return ""
    dumps = [limiter.dump() for limiter in limiters() if limiter.statistics().borrowers]
    return f"the test left {len(left)} of its calls running:\n" + "\n".join(dumps)


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails the test if it leaves calls of any limiter running."""
    before = _running()
    yield
    if text := _leftovers(before):
        pytest.fail(text, pytrace=False)


@pytest.fixture(autouse=True)
def _tidegate_every_test(request: pytest.FixtureRequest) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    if not request.config.getini("tidegate_no_leftovers"):
        yield
        return
    before = _running()
    yield
    if text := _leftovers(before):
        pytest.fail(text, pytrace=False)
