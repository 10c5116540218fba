"""deploy/Dockerfile, where no engine runs: the linter, the build and its context, what the image says of itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.fake import Fake
from support.gateway import Gateway, binary
from support.llama import VENV
from support.process import ROOT

DOCKERFILE = ROOT / "deploy/Dockerfile"
IN_CC = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
"""Libraries of distroless/cc that the program may ask for."""


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def last(name: str) -> str:
    return [words for other, words in instructions() if other == name][-1]


def lint(file: Path) -> str:
    done = subprocess.run([str(VENV / "hadolint"), str(file)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_linter_finds_nothing(tmp_path: Path):
    assert lint(DOCKERFILE) == ""
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("rust:1.95-bookworm", "rust"))
    assert "DL3006" in lint(worse)


def test_the_build_is_the_one_that_is_tested():
    assert ("RUN", "cargo build --release --locked -p tidegate") in instructions()
    assert "\t$(CARGO) build --release --locked -p tidegate\n" in (ROOT / "Makefile").read_text()
    base = re.search(r"rust:(\d+\.\d+)-(\w+) AS build", DOCKERFILE.read_text())
    wanted = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert tuple(map(int, base[1].split("."))) >= tuple(map(int, wanted.split(".")[:2]))
    assert base[2] == "bookworm" and last("FROM") == "gcr.io/distroless/cc-debian12:nonroot", "two Debians"


def test_the_context_has_all_that_the_build_reads(tmp_path: Path):
    """What .dockerignore lets in, and cargo's own list of what it needs."""
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in wanted:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    # For this machine: the crates of other platforms have not been downloaded.
    tree = ["cargo", "tree", "--locked", "--offline", "--workspace"]
    done = subprocess.run(tree, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tracked = subprocess.run(["git", "ls-files", "crates"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        file = ROOT / name
        outside = re.findall(r'include_(?:str|bytes)!\("((?:\.\./)+[^"]+)"\)', file.read_text(errors="ignore"))
        for target in outside if file.suffix == ".rs" and "/tests/" not in name else []:
            assert (tmp_path / name).parent.joinpath(target).exists(), f"{name} includes {target}"


def test_the_base_has_the_libraries():
    done = subprocess.run(["readelf", "-d", str(binary())], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout))
    assert needed and needed <= IN_CC


def test_it_runs_as_nobody_and_without_a_shell():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))
    for name in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(last(name)), list), "the form that needs no shell"
    assert last("STOPSIGNAL") == "SIGTERM"


@pytest.fixture
def fake():
    with Fake() as server:
        yield server


def health(admin: str) -> subprocess.CompletedProcess[str]:
    """As HEALTHCHECK says it, with this gateway's port."""
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command == ["/usr/local/bin/tidegate", "health"]
    words = [str(binary()), "health", "--admin", admin.removeprefix("http://")]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)


def test_its_health_is_the_programs_own_word(fake: Fake):
    with Gateway("--upstream", fake.url) as gateway:
        assert health(gateway.admin).returncode == 0
    done = health(gateway.admin)
    assert done.returncode == 1 and "no answer from the admin port" in done.stderr


def test_it_is_published_only_with_keys(tmp_path: Path):
    """The image listens on all addresses of its container."""
    name, _, listen = last("ENV").partition("=")
    assert (name, listen) == ("TIDEGATE_LISTEN", "0.0.0.0:8080")
    config = tmp_path / "tidegate.toml"
    config.write_text('[[upstreams]]\nurl = "http://127.0.0.1:1"\n')

    def check() -> subprocess.CompletedProcess[str]:
        words = [str(binary()), "check", "--config", str(config)]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {name: listen})

    assert check().returncode == 2
    key = '[[keys]]\nname = "one"\nsha256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"\n'
    config.write_text(config.read_text() + key)
    assert check().returncode == 0, check().stderr
