"""The examples of README.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server import serving

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int) -> None:
    with serving("answer") as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url + "/v1", "OPENAI_API_KEY": "k"}
        command = [sys.executable, "-c", EXAMPLES[number]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        if number == 0:
            assert done.stdout == "hello\n" and len(server.requests) == 1


def test_pip_finds_the_package_from_the_root_too() -> None:
    tomllib = pytest.importorskip("tomllib")
    here, root = (
        tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
        for folder in (README.parent, README.parents[1])
    )
    assert root == {**here, "backend-path": ["python"]}


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
