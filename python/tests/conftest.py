from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _every_test(no_leftovers: None) -> Iterator[None]:
    """What these tests start must end too."""
    yield
