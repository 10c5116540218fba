"""Builds the wheel: maturin makes the extension module, and the gateway's binary goes beside it into `bin`.

A build backend of PEP 517 around maturin's, as maturin puts either a module or a binary into a wheel, not both. What it
needs is a Rust toolchain and this repository, of which either the root or `python` may be given to pip. `TIDEGATE_BIN`
names a gateway that is built already; empty, it leaves the gateway out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SCRIPTS = HERE / "tidegate.data" / "scripts"
NAME = "tidegate.exe" if sys.platform == "win32" else "tidegate"


def _maturin() -> Any:
    if shutil.which("cargo") is None:
        sys.exit("tidegate: building this package needs a Rust toolchain (cargo), 1.90 or newer: see https://rustup.rs")
    import maturin

    os.chdir(HERE)  # where maturin looks for what it builds; the frontend is in the root if it was given that
    return maturin


def _gateway() -> Path | None:
    """The binary that goes into the wheel."""
    if (given := os.environ.get("TIDEGATE_BIN")) is not None:
        return Path(given) if given else None
    if not (ROOT / "crates" / "gateway" / "Cargo.toml").exists():
        return None
    command = ["cargo", "build", "--release", "--locked", "-p", "tidegate", "--manifest-path", str(ROOT / "Cargo.toml")]
    subprocess.run(command, check=True)
    return Path(os.environ["CARGO_TARGET_DIR"]) / "release" / NAME


def _prepare() -> Any:
    maturin = _maturin()
    os.environ.setdefault("CARGO_TARGET_DIR", str(ROOT / "target"))
    shutil.rmtree(SCRIPTS, ignore_errors=True)
    SCRIPTS.mkdir(parents=True)
    if (binary := _gateway()) is not None:
        shutil.copy2(binary, SCRIPTS / NAME)
    return maturin


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(directory: str, config_settings: dict[str, Any] | None = None) -> str:
    SCRIPTS.mkdir(parents=True, exist_ok=True)  # maturin wants the folder to be there
    directory = os.path.abspath(directory)
    return _maturin().prepare_metadata_for_build_wheel(directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    directory = os.path.abspath(directory)
    return _prepare().build_wheel(directory, config_settings, metadata_directory)


def build_editable(
    directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    directory = os.path.abspath(directory)
    return _prepare().build_editable(directory, config_settings, metadata_directory)


def build_sdist(directory: str, config_settings: dict[str, Any] | None = None) -> str:
    sys.exit("tidegate: there is no source archive of this package: build it from a checkout, or install a wheel")
